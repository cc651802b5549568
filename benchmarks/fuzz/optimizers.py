"""Optimizers of the random programs: lines that define a class, if any, and an expression that makes one."""

from __future__ import annotations

PLAIN = {
    "SGD": "torch.optim.SGD({p}, lr=0.1)",
    "SGD with momentum": "torch.optim.SGD({p}, lr=0.1, momentum=0.9)",
    "AdamW": "torch.optim.AdamW({p}, lr=0.01, eps=1e-6)",
    "Adam": "torch.optim.Adam({p}, lr=0.01, eps=1e-6)",
    "Adagrad": "torch.optim.Adagrad({p}, lr=0.05)",
    "RMSprop": "torch.optim.RMSprop({p}, lr=0.01, eps=1e-4)",
    "RAdam": "torch.optim.RAdam({p}, lr=0.01, betas=(0.9, 0.5))",
    "NAdam": "torch.optim.NAdam({p}, lr=0.01, eps=1e-6)",
    "ASGD": "torch.optim.ASGD({p}, lr=0.1, t0=2)",
}

_HEAD = """class {name}(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr, weight_decay=0.0{more}))
{attributes}
    @torch.no_grad()
    def step(self, closure=None):
"""
_BODIES = {
    # name: (numbers in the group, attributes, body)
    "CountsInGroup": (", k=0", "", """
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"] ** 0.5)
"""),
    "CountsInState": ("", "", """
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p)
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                p.add_(state["m"], alpha=-group["lr"] / (1 - 0.9 ** state["step"]))
"""),
    "CountsItself": ("", "        self.t = 0\n", """
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * min(1.0, self.t / 3) * p.grad.sign())
"""),
    "SumsWeights": (", weight_sum=0.0", "", """
        for group in self.param_groups:
            group["weight_sum"] += group["lr"] ** 2
            c = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.detach().clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], c)
"""),
    "SyncsNowAndThen": (", k=0", "", """
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                p.add_(p.grad, alpha=-group["lr"])
                if group["k"] % 2 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
"""),
    "KeepsTheWeight": (", decay=0.01", "", """
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "before" not in state:
                    state["before"] = p.detach().clone()
                p.add_(p.grad, alpha=-group["lr"])
                p.lerp_(state["before"], 0.3)
                state["before"].copy_(p)
                p.mul_(1 - group["decay"])
"""),
    "BeginsLater": (", k=0", "", """
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.add_(p.grad, alpha=-group["lr"])
                if group["k"] >= 3:
                    state = self.state[p]
                    if "slow" not in state:
                        state["slow"] = p.detach().clone()
                    state["slow"].lerp_(p, 0.5)
                    p.lerp_(state["slow"], 0.1)
"""),
    "KeepsAFunction": ("", "        self.rule = lambda g: g.sign()\n", """
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.rule(p.grad), alpha=-0.1 * group["lr"])
"""),
    "KeepsTensors": ("", "        self.total = torch.zeros(())\n", """
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.total = self.total + p.grad.square().sum()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (1 + self.total).sqrt())
"""),
}  # fmt: skip
OWN = {
    name: _HEAD.format(name=name, more=more, attributes=attributes).rstrip("\n") + body
    for name, (more, attributes, body) in _BODIES.items()
}
