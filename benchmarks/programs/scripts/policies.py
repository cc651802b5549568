"""Policies: gradients by returns and advantages, and preferences."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.programs.script import CALLS, Register, Script
from benchmarks.programs.scripts.blocks import GPT, mlp, tokens

program = Register("policies")
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
    "PPO (CleanRL)",
    "shuffled minibatches by indices, approx_kl and clip fractions returned, lr annealed",
)
def ppo() -> Script:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic, self.actor = (
                mlp(STATES, 8, 1, act=nn.Tanh),
                mlp(STATES, 8, ACTIONS, act=nn.Tanh),
            )

        def get_action_and_value(self, x: Tensor, action: Tensor) -> Any:
            probs = Categorical(logits=self.actor(x))
            return probs.log_prob(action), probs.entropy(), self.critic(x)

    class Args:
        clip_coef, ent_coef, vf_coef, max_grad_norm, norm_adv = 0.2, 0.01, 0.5, 0.5, True

    model, args = Agent(), Args()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-3, eps=1e-5)

    def train_step(model: Any, optimizer: Any, obs: Tensor, actions: Tensor, logprobs: Tensor,
                   advantages: Tensor, returns: Tensor, values: Tensor) -> Any:  # fmt: skip
        newlogprob, entropy, newvalue = model.get_action_and_value(obs, actions.long())
        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        with torch.no_grad():
            approx_kl = ((ratio - 1) - logratio).mean()
            clipfrac = ((ratio - 1.0).abs() > args.clip_coef).double().mean()
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(
            -advantages * ratio,
            -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef),
        ).mean()
        newvalue = newvalue.view(-1)
        clipped = values + torch.clamp(newvalue - values, -args.clip_coef, args.clip_coef)
        v_loss = 0.5 * torch.max((newvalue - returns) ** 2, (clipped - returns) ** 2).mean()
        loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        return loss, approx_kl, clipfrac

    def between(call: int) -> None:
        optimizer.param_groups[0]["lr"] = (1.0 - (call + 1) / 8) * 2.5e-3
        args.ent_coef *= 0.5

    batches = []
    for _ in range(CALLS):
        one = [torch.randn(ROWS, STATES), torch.randint(0, 2, (ROWS,)).double(), -torch.rand(ROWS)]
        batches.append((*one, *torch.randn(3, ROWS)))
    return Script(train_step, model, optimizer, batches, between)


@program(
    "PPO, a batch of uneven tensors",
    "the whole rollout and the indices of a minibatch, of other first dims",
)
def ppo_rollout() -> Script:
    model = nn.ModuleDict(
        {"actor": mlp(STATES, 8, ACTIONS, act=nn.Tanh), "critic": mlp(STATES, 8, 1)}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def update(
        model: Any, optimizer: Any, obs: Tensor, actions: Tensor, returns: Tensor, mb_inds: Tensor
    ) -> Tensor:
        chosen = obs[mb_inds]
        logp = (
            F.log_softmax(model["actor"](chosen), -1)
            .gather(1, actions[mb_inds].view(-1, 1))
            .squeeze(1)
        )
        value = model["critic"](chosen).squeeze(-1)
        loss = -(logp * (returns[mb_inds] - value.detach())).mean() + F.mse_loss(
            value, returns[mb_inds]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    obs, actions, returns = (
        torch.randn(16, STATES),
        torch.randint(0, ACTIONS, (16,)),
        torch.randn(16),
    )
    batches = [(obs, actions, returns, torch.randperm(16)[:4]) for _ in range(CALLS)]
    return Script(update, model, optimizer, batches)


@program(
    "reinforce",
    "an episode's log probabilities by a Categorical, normalized returns, a running reward outside",
)
def reinforce() -> Script:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.dropout, self.affine2 = (
                nn.Linear(4, 16),
                nn.Dropout(p=0.6),
                nn.Linear(16, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)

    policy, eps = Policy(), 1e-8
    optimizer, running = torch.optim.Adam(policy.parameters(), lr=1e-2), {"reward": 10.0}

    def finish_episode(
        policy: Any, optimizer: Any, states: Tensor, actions: Tensor, rewards: Tensor
    ) -> Tensor:
        returns, R = [], 0
        for r in reversed(rewards.unbind()):
            R = r + 0.99 * R
            returns.insert(0, R)
        returns = torch.stack(returns)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        policy_loss = -Categorical(policy(states)).log_prob(actions) * returns
        optimizer.zero_grad()
        loss = policy_loss.sum()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        running["reward"] = 0.05 * call + (1 - 0.05) * running["reward"]

    batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,)), torch.rand(8)) for _ in range(CALLS)]
    return Script(finish_episode, policy, optimizer, batches, between, lambda: running)


@program("actor_critic / A2C", "a shared body, two heads, smooth L1, an entropy weight that decays")
def a2c() -> Script:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1 = nn.Linear(STATES, 16)
            self.action_head, self.value_head = nn.Linear(16, ACTIONS), nn.Linear(16, 1)
            self.beta = 0.01

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.affine1(x))
            return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model = Policy()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, eps=1e-5)

    def train_step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        probs, value = model(batch["state"])
        m = Categorical(probs)
        advantage = batch["reward"] - value
        actor = -m.log_prob(batch["action"].squeeze(1)) * advantage.detach().squeeze(1)
        loss = (
            actor.mean()
            + F.smooth_l1_loss(value, batch["reward"])
            - model.beta * m.entropy().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        model.beta *= 0.5

    return Script(train_step, model, optimizer, [(_transitions(i),) for i in range(CALLS)], between)


@program(
    "DPO", "a policy and a frozen reference, log-probabilities of pairs, beta changed in between"
)
def dpo() -> Script:
    policy = GPT(layers=1)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    model = nn.ModuleDict({"policy": policy, "reference": reference})
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-4)
    config = {"beta": 0.1, "label_smoothing": 0.0}

    def logps(net: Any, ids: Tensor, mask: Tensor) -> Tensor:
        logits = net(ids)[0][:, :-1].log_softmax(-1)
        per_token = torch.gather(logits, 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        return (per_token * mask[:, 1:]).sum(-1)

    def train_step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Any:
        chosen, rejected = batch["chosen"], batch["rejected"]
        pi = logps(model["policy"], chosen, batch["mask"]) - logps(
            model["policy"], rejected, batch["mask"]
        )
        with torch.no_grad():
            ref = logps(model["reference"], chosen, batch["mask"])
            ref = ref - logps(model["reference"], rejected, batch["mask"])
        beta, smooth = config["beta"], config["label_smoothing"]
        logits = pi - ref
        loss = (
            -F.logsigmoid(beta * logits) * (1 - smooth) - F.logsigmoid(-beta * logits) * smooth
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model["policy"].parameters(), 10.0)
        optimizer.step()
        return loss, (beta * logits > 0).double().mean()

    def between(call: int) -> None:
        config["beta"] += 0.1
        config["label_smoothing"] = 0.05

    batches = []
    for i in range(CALLS):
        mask = (torch.arange(8) >= 2 + torch.arange(4)[:, None] % 3).double()
        batches.append(({"chosen": tokens(i)[0], "rejected": tokens(i + 9)[0], "mask": mask},))
    return Script(train_step, model, optimizer, batches, between)
