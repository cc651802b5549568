"""Reinforcement learning and preferences: the updates of agents, on recorded batches."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import mlp

program = Register("decisions")
STATES, ACTIONS, ROWS = 4, 2, 8


def _transitions(which: int, *, discrete: bool = True) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(which)
    action = (
        torch.randint(0, ACTIONS, (ROWS, 1), generator=drawn)
        if discrete
        else torch.rand(ROWS, ACTIONS, generator=drawn) * 2 - 1
    )
    return {
        "state": torch.randn(ROWS, STATES, generator=drawn),
        "action": action,
        "next": torch.randn(ROWS, STATES, generator=drawn),
        "reward": torch.randn(ROWS, 1, generator=drawn),
        "not_done": (torch.rand(ROWS, 1, generator=drawn) > 0.2).double(),
    }


@program(
    "DQN", "a policy and a target network, a soft update after the step, gradients clipped by value"
)
def dqn() -> Script:
    policy = mlp(STATES, 16, ACTIONS)
    target = copy.deepcopy(policy)
    model = nn.ModuleDict({"policy": policy, "target": target.requires_grad_(False)})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
    GAMMA, TAU, criterion = 0.99, 0.05, nn.SmoothL1Loss()

    def optimize_model(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        values = model["policy"](batch["state"]).gather(1, batch["action"])
        with torch.no_grad():
            following = model["target"](batch["next"]).max(1).values * batch["not_done"][:, 0]
        expected = following * GAMMA + batch["reward"][:, 0]
        loss = criterion(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(model["policy"].parameters(), 100)
        optimizer.step()
        return loss

    def between(call: int) -> Any:
        with whole(model):
            new, old = policy.state_dict(), target.state_dict()
            for key in new:
                old[key] = new[key] * TAU + old[key] * (1 - TAU)
            target.load_state_dict(old)
            with torch.no_grad():
                return policy(torch.ones(1, STATES)).max(1).indices.item()

    return Script(
        optimize_model, model, optimizer, [(_transitions(i),) for i in range(CALLS)], between
    )


@program(
    "DQN, target copied now and then",
    "total_steps counts in the agent; target by load_state_dict within the step",
)
def dqn_hard() -> Script:
    class Agent:
        def __init__(self) -> None:
            self.model = nn.ModuleDict(
                {"q": mlp(STATES, 16, ACTIONS), "target": mlp(STATES, 16, ACTIONS)}
            )
            self.model["target"].load_state_dict(self.model["q"].state_dict())
            self.optimizer = torch.optim.Adam(self.model["q"].parameters(), lr=1e-2)
            self.learn_step_counter, self.target_every = 0, 2

        def learn(self, model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
            if self.learn_step_counter % self.target_every == 0:
                model["target"].load_state_dict(model["q"].state_dict())
            self.learn_step_counter += 1
            q = model["q"](batch["state"]).gather(1, batch["action"])
            best = model["target"](batch["next"]).detach().max(1)[0].view(-1, 1)
            loss = F.mse_loss(q, batch["reward"] + 0.9 * best * batch["not_done"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

    agent = Agent()
    batches = [(_transitions(i),) for i in range(CALLS)]
    return Script(
        agent.learn, agent.model, agent.optimizer, batches, watch=lambda: agent.learn_step_counter
    )


class Critic(nn.Module):
    """Two values of a state and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = mlp(STATES + ACTIONS, 16, 1), mlp(STATES + ACTIONS, 16, 1)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        sa = torch.cat([state, action], 1)
        return self.q1(sa), self.q2(sa)


@program(
    "TD3", "self.total_it += 1 and a policy update every other call; targets moved within the step"
)
def td3() -> Script:
    class TD3:
        def __init__(self) -> None:
            actor, critic = nn.Sequential(*mlp(STATES, 16, ACTIONS), nn.Tanh()), Critic()
            self.model = nn.ModuleDict(
                {"actor": actor, "actor_target": copy.deepcopy(actor), "critic": critic,
                 "critic_target": copy.deepcopy(critic)}
            )  # fmt: skip
            self.optimizers = {
                "actor": torch.optim.Adam(actor.parameters(), lr=3e-3),
                "critic": torch.optim.Adam(critic.parameters(), lr=3e-3),
            }
            self.total_it, self.policy_freq, self.tau = 0, 2, 0.05

        def train(self, model: Any, optimizers: Any, b: dict[str, Tensor]) -> Any:
            self.total_it += 1
            with torch.no_grad():
                noise = (torch.randn_like(b["action"]) * 0.2).clamp(-0.5, 0.5)
                next_action = (model["actor_target"](b["next"]) + noise).clamp(-1, 1)
                target = torch.min(*model["critic_target"](b["next"], next_action))
                target = b["reward"] + b["not_done"] * 0.99 * target
            q1, q2 = model["critic"](b["state"], b["action"])
            critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
            optimizers["critic"].zero_grad()
            critic_loss.backward()
            optimizers["critic"].step()
            if self.total_it % self.policy_freq == 0:
                actor_loss = -model["critic"](b["state"], model["actor"](b["state"]))[0].mean()
                optimizers["actor"].zero_grad()
                actor_loss.backward()
                optimizers["actor"].step()
                for name in ("actor", "critic"):
                    pairs = zip(
                        model[name].parameters(), model[f"{name}_target"].parameters(), strict=True
                    )
                    for p, t in pairs:
                        t.data.copy_(self.tau * p.data + (1 - self.tau) * t.data)
            return critic_loss

    agent = TD3()
    batches = [(_transitions(i, discrete=False),) for i in range(CALLS)]
    return Script(agent.train, agent.model, agent.optimizers, batches, watch=lambda: agent.total_it)


@program("SAC", "three optimizers, a learned log_alpha, alpha read as a number in between, rsample")
def sac() -> Script:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = mlp(STATES, 16, 2 * ACTIONS), Critic()
            self.critic_target = copy.deepcopy(self.critic)
            self.log_alpha = nn.Parameter(torch.tensor(math.log(0.1)))

        def sample(self, state: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_std = self.actor(state).chunk(2, dim=-1)
            normal = Normal(mean, log_std.clamp(-5, 2).exp())
            x = normal.rsample()
            y = torch.tanh(x)
            logp = normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
            return y, logp.sum(1, keepdim=True)

    model = Agent()
    optimizers = {
        "actor": torch.optim.Adam(model.actor.parameters(), lr=1e-3),
        "critic": torch.optim.Adam(model.critic.parameters(), lr=1e-3),
        "alpha": torch.optim.Adam([model.log_alpha], lr=1e-2),
    }
    target_entropy, updates = -2.0, {"n": 0}

    def update(model: Any, opts: Any, b: dict[str, Tensor]) -> Any:
        alpha = model.log_alpha.exp().detach()
        with torch.no_grad():
            a, logp = model.sample(b["next"])
            target = torch.min(*model.critic_target(b["next"], a)) - alpha * logp
            target = b["reward"] + b["not_done"] * 0.99 * target
        q1, q2 = model.critic(b["state"], b["action"])
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        opts["critic"].zero_grad()
        critic_loss.backward()
        opts["critic"].step()
        a, logp = model.sample(b["state"])
        actor_loss = (alpha * logp - torch.min(*model.critic(b["state"], a))).mean()
        opts["actor"].zero_grad()
        actor_loss.backward()
        opts["actor"].step()
        alpha_loss = -(model.log_alpha * (logp + target_entropy).detach()).mean()
        opts["alpha"].zero_grad()
        alpha_loss.backward()
        opts["alpha"].step()
        return critic_loss, actor_loss, alpha_loss

    def between(call: int) -> Any:
        updates["n"] += 1
        with torch.no_grad(), whole(model):
            pairs = zip(model.critic.parameters(), model.critic_target.parameters(), strict=True)
            for p, t in pairs:
                t.data.mul_(0.95).add_(p.data * 0.05)
            return model.log_alpha.exp().item()

    batches = [(_transitions(i, discrete=False),) for i in range(CALLS)]
    return Script(update, model, optimizers, batches, between)
