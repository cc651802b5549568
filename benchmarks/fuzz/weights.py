"""What a script does to buffers, weights, averages of them, and schedules."""

from __future__ import annotations

from benchmarks.fuzz.make import one_of, same

BUFFERS = one_of(
    same(
        "a buffer written in place",
        init=['self.register_buffer("K", torch.zeros(12))'],
        forward=[
            "with torch.no_grad():",
            "    self.K.mul_(0.9).add_(h.mean(0), alpha=0.1)",
            "h = h - self.K",
        ],
    ),
    same(
        "a buffer set anew",
        init=['self.register_buffer("K", torch.zeros(12))'],
        forward=["h = h - self.K", "self.K = 0.9 * self.K + 0.1 * h.mean(0).detach()"],
    ),
    same(
        "a count as a buffer",
        init=['self.register_buffer("K", torch.zeros((), dtype=torch.long))'],
        forward=["self.K += 1", "h = h * (1 + 0.1 * self.K)"],
    ),
    same(
        "a row of a buffer written",
        init=['self.register_buffer("K", torch.zeros(3, 12))'],
        forward=["self.K[1] = h.detach().mean(0)", "self.K[2:] += 1", "h = h + self.K.sum(0)"],
    ),
    same(
        "a buffer changed in between",
        init=['self.register_buffer("K", torch.ones(12))'],
        forward=["h = h * self.K"],
        between=["with torch.no_grad():", "    model.K.mul_(1.5)"],
    ),
    same(
        "a tensor that the module keeps",
        init=["self.K = None"],
        forward=["self.K = h.detach().mean()"],
        tail=['extra["kept"] = model.K'],
    ),
    same(
        "a count of calls in forward",
        init=["self.K = 0"],
        forward=["self.K += 1", "h = h * (1 + 0.1 * (self.K % 2))"],
        watch=("model.K",),
    ),
)

AVERAGES = one_of(
    same(
        "an average of weights outside",
        optimizer=["K = [p.detach().clone() for p in model.parameters()]"],
        between=[
            "with torch.no_grad(), whole(model):",
            "    for a, p in zip(K, model.parameters()):",
            "        a.mul_(0.9).add_(p, alpha=0.1)",
        ],
        watch=("K",),
    ),
    same(
        "an average of weights in a module, within",
        model=["model.K = copy.deepcopy(model.a).requires_grad_(False)"],
        tail=[
            "with torch.no_grad():",
            "    for a, p in zip(model.K.parameters(), model.a.parameters()):",
            "        a.mul_(0.9).add_(p, alpha=0.1)",
        ],
    ),
    same(
        "AveragedModel in between",
        optimizer=["K = torch.optim.swa_utils.AveragedModel(model)"],
        between=["with whole(model):", "    K.update_parameters(model)"],
        watch=("K.state_dict()",),
    ),
    same(
        "an average with bias correction by a count",
        optimizer=["K = {'n': 0, 'avg': torch.zeros(12)}"],
        between=[
            "K['n'] += 1",
            "with torch.no_grad(), whole(model):",
            "    K['avg'] = K['avg'] + (model.a.bias.detach() - K['avg']) / K['n']",
        ],
        watch=("K",),
    ),
    same(
        "an average of tensors kept outside, within the step",
        setup=["K = {'avg': torch.zeros(())}"],
        tail=["K['avg'] = 0.9 * K['avg'] + 0.1 * loss.detach()"],
        watch=("K",),
    ),
)

WEIGHTS = one_of(
    same(
        "weights scaled in between",
        between=["with torch.no_grad(), whole(model):", "    model.c.weight.mul_(0.9)"],
    ),
    same(
        "p.data set in between",
        between=["with whole(model):", "    model.c.bias.data = model.c.bias.data * 0.5"],
    ),
    same(
        "frozen parameters, switched in between",
        between=["for p in model.b.parameters():", "    p.requires_grad_(call % 2 == 1)"],
    ),
    same(
        "a layer frozen at first",
        model=["model.a.requires_grad_(False)"],
        between=["if call == 1:", "    model.a.requires_grad_(True)"],
    ),
    same(
        "weights kept and loaded again",
        optimizer=["K = {}"],
        between=[
            "with whole(model):",
            "    if call == 0:",
            "        K.update({n: p.detach().clone() for n, p in model.named_parameters()})",
            "    if call == 2:",
            "        with torch.no_grad():",
            "            for n, p in model.named_parameters():",
            "                p.copy_(K[n])",
        ],
    ),
    same(
        "tied weights",
        model=["model.K = nn.Linear(12, 12)", "model.K.weight = model.b.weight"],
        loss=["loss = loss + model.K(torch.tanh(model.a(x))).square().mean()"],
    ),
    same("a module called twice", forward=["h = torch.tanh(self.b(h))"]),
    same("an unused module", model=["model.K = nn.Linear(3, 3)"]),
    same(
        "an evaluation in between",
        between=[
            "model.eval()",
            "with torch.no_grad(), whole(model):",
            "    told['K'] = F.cross_entropy(model(probe[0]), probe[1])",
            "model.train()",
        ],
    ),
    same(
        "a norm logged in between",
        between=["with whole(model):", "    told['K'] = model.a.weight.norm().item()"],
    ),
    same(
        "weights initialized anew in between",
        between=[
            "if call == 1:",
            "    with whole(model):",
            "        nn.init.constant_(model.c.bias, 0.25)",
        ],
    ),
)

SCHEDULES = one_of(
    same(
        "StepLR",
        optimizer=["K = torch.optim.lr_scheduler.StepLR(first, 2, 0.5)"],
        between=["K.step()"],
    ),
    same(
        "LambdaLR",
        optimizer=["K = torch.optim.lr_scheduler.LambdaLR(first, lambda s: 1 / (1 + s))"],
        between=["K.step()"],
    ),
    same(
        "cosine",
        optimizer=["K = torch.optim.lr_scheduler.CosineAnnealingLR(first, 4)"],
        between=["K.step()"],
    ),
    same("lr by hand", between=["for g in first.param_groups:", '    g["lr"] *= 0.7']),
    same(
        "weight decay by hand",
        between=["for g in first.param_groups:", '    g["weight_decay"] = 0.01 * call'],
    ),
    same(
        "lr = 0 now and then",
        between=["for g in first.param_groups:", '    g["lr"] = 0.1 * (call % 2)'],
    ),
    same("state cleared", between=["if call == 1:", "    first.state.clear()"]),
    same(
        "a group added",
        model=["model.K = nn.Parameter(torch.ones(4))"],
        loss=["loss = loss + (model.K * out).square().mean()"],
        between=[
            "if call == 1 and not any(model.K is p for g in first.param_groups for p in g['params']):",
            "    first.add_param_group({'params': [model.K]})",
        ],
    ),
)
