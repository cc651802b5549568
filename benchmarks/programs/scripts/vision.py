"""Images: classifiers, segmentation, transfer of style."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import CLASSES, Block, images, mlp

program = Register("vision")


def _batches(**sizes: int) -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (images(i, **sizes) for i in range(CALLS))]


def _classify(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


@program("mnist", "dropout, NLL, Adadelta, StepLR, a test loop that counts what is right")
def mnist() -> Script:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 4, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = self.dropout2(F.relu(self.fc1(torch.flatten(self.dropout1(x), 1))))
            return F.log_softmax(self.fc2(x), dim=1)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def train_step(model: Any, optimizer: Any, data: Tensor, target: Tensor) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss

    held_out = _batches(channels=1)[0]

    def between(call: int) -> Any:
        scheduler.step()
        model.eval()
        with torch.no_grad(), whole(model):
            output = model(held_out[0])
            right = output.argmax(dim=1, keepdim=True).eq(held_out[1].view(-1, 1)).sum().item()
            return F.nll_loss(output, held_out[1], reduction="sum").item(), right

    return Script(train_step, model, optimizer, _batches(channels=1), between)


@program("mnist_rnn", "an LSTM over the rows of an image, batch first")
def mnist_rnn() -> Script:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(input_size=8, hidden_size=8, batch_first=True)
            self.batchnorm, self.fc = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.rnn(x.reshape(-1, 8, 8))
            return F.log_softmax(self.fc(self.batchnorm(out[:, -1])), dim=1)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        output = model(x)
        loss = F.nll_loss(output, y)
        loss.backward()
        optimizer.step()
        return loss, output.argmax(1)

    return Script(train_step, model, optimizer, _batches(channels=1))


@program(
    "mnist_forward_forward", "each layer trains itself with an optimizer of its own, in a loop"
)
def forward_forward() -> Script:
    class Layer(nn.Linear):
        threshold = 2.0

        def forward(self, x: Tensor) -> Tensor:
            direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
            return torch.relu(direction @ self.weight.T + self.bias.unsqueeze(0))

    model = nn.ModuleList([Layer(8, 16), Layer(16, 16)])
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in model]

    def train_step(model: Any, optimizers: Any, positive: Tensor, negative: Tensor) -> Any:
        losses = []
        for layer, optimizer in zip(model, optimizers, strict=True):
            good, bad = layer(positive).pow(2).mean(1), layer(negative).pow(2).mean(1)
            both = torch.cat([-good + layer.threshold, bad - layer.threshold])
            loss = torch.log(1 + torch.exp(both)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            positive, negative = layer(positive).detach(), layer(negative).detach()
        return losses

    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(CALLS)]
    return Script(train_step, model, optimizers, batches)


@program("mnist_hogwild's step", "a step of args, as a Namespace says; SGD with momentum")
def hogwild() -> Script:
    import argparse
    from functools import partial

    args = argparse.Namespace(lr=0.01, momentum=0.5, log_interval=2, dry_run=False)
    model = nn.Sequential(nn.Flatten(), mlp(64, 16, CLASSES), nn.LogSoftmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    def train_step(args: Any, model: Any, optimizer: Any, data: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss

    return Script(partial(train_step, args), model, optimizer, _batches(channels=1))


@program(
    "imagenet ResNet",
    "BatchNorm, SGD with momentum, StepLR, accuracy at k returned as a number of samples",
)
def resnet() -> Script:
    class Basic(nn.Module):
        def __init__(self, a: int, b: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
            self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
            self.relu = nn.ReLU(inplace=True)
            self.down = nn.Conv2d(a, b, 1, stride, bias=False) if stride > 1 else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(out.add_(self.down(x)))

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1), Basic(4, 4), Basic(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
        with torch.no_grad():
            _, pred = output.topk(max(topk), 1, True, True)
            correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
            return [
                correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0))
                for k in topk
            ]

    def train_step(model: Any, optimizer: Any, x: Tensor, target: Tensor) -> Any:
        output = model(x)
        loss = criterion(output, target)
        acc1, acc2 = accuracy(output, target, topk=(1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, acc1, acc2

    return Script(train_step, model, optimizer, _batches(rows=8), lambda call: scheduler.step())


@program("MobileNetV2", "inverted residuals, ReLU6, dropout, RMSprop with an ExponentialLR")
def mobilenet() -> Script:
    class Inverted(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(c, 2 * c, 1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU6(inplace=True),
                nn.Conv2d(2 * c, 2 * c, 3, 1, 1, groups=2 * c, bias=False), nn.BatchNorm2d(2 * c),
                nn.ReLU6(inplace=True), nn.Conv2d(2 * c, c, 1, bias=False), nn.BatchNorm2d(c),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), Inverted(4), Inverted(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(4, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, eps=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Script(_classify, model, optimizer, _batches(), lambda call: scheduler.step())


@program(
    "ConvNeXt", "depthwise convolutions, layer scale, stochastic depth, mixup outside of the step"
)
def convnext() -> Script:
    class Stage(nn.Module):
        def __init__(self, dim: int, drop: float) -> None:
            super().__init__()
            self.dwconv, self.norm = (
                nn.Conv2d(dim, dim, 3, padding=1, groups=dim),
                nn.LayerNorm(dim),
            )
            self.mlp, self.gamma = (
                mlp(dim, 4 * dim, dim, act=nn.GELU),
                nn.Parameter(0.1 * torch.ones(dim)),
            )
            self.drop_prob = drop

        def forward(self, x: Tensor) -> Tensor:
            y = self.gamma * self.mlp(self.norm(self.dwconv(x).permute(0, 2, 3, 1)))
            y = y.permute(0, 3, 1, 2)
            if self.training and self.drop_prob > 0:
                keep = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.drop_prob)
                y = y * keep.div_(1 - self.drop_prob)
            return x + y

    model = nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), Stage(8, 0.0), Stage(8, 0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    batches = []
    for x, y in _batches():
        soft = F.one_hot(y, CLASSES).to(x.dtype)
        batches.append((0.7 * x + 0.3 * x.flip(0), 0.7 * soft + 0.3 * soft.flip(0)))

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = torch.sum(-y * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(train_step, model, optimizer, batches)


@program(
    "vision_transformer", "a class token, learned positions, label smoothing changed in between"
)
def vision_transformer() -> Script:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.cls = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
            self.pos = nn.Parameter(0.02 * torch.randn(1, 5, 8))
            self.block, self.norm = Block(8, 0.1, causal=False), nn.LayerNorm(8)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
            return self.head(self.norm(self.block(x))[:, 0])

    model, criterion = ViT(), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=CALLS)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        scheduler.step()
        criterion.label_smoothing = 0.1 / (call + 2)

    return Script(train_step, model, optimizer, _batches(), between)
