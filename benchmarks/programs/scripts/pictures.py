"""Pictures from pictures, pairs of pictures, and a teacher."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import CLASSES, images, mlp, vectors

program = Register("pictures")


def _batches(**sizes: int) -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (images(i, **sizes) for i in range(CALLS))]


@program("super_resolution", "pixel shuffle, orthogonal init, PSNR of a test batch")
def super_resolution() -> Script:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, 1, 2), nn.Conv2d(4, 4, 3, 1, 1)
            self.pixel_shuffle = nn.PixelShuffle(2)
            nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

        def forward(self, x: Tensor) -> Tensor:
            return self.pixel_shuffle(self.conv2(F.relu(self.conv1(x))))

    model, criterion = Net(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = [(torch.randn(4, 1, 4, 4), torch.randn(4, 1, 8, 8)) for _ in range(CALLS)]
    epoch_loss = [0.0]

    def train_step(model: Any, optimizer: Any, x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    @torch.no_grad()
    def between(call: int) -> Any:
        with whole(model):
            mse = criterion(model(batches[0][0]), batches[0][1])
        epoch_loss[0] += mse.item()
        return 10 * torch.log10(1 / mse)

    return Script(train_step, model, optimizer, batches, between, lambda: epoch_loss)


@program(
    "fast_neural_style",
    "features of a frozen network, Gram matrices, instance norm; weights of losses change",
)
def neural_style() -> Script:
    net = nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 3, 2, 1),
    )  # fmt: skip
    vgg = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    model = nn.ModuleDict({"net": net, "vgg": vgg.requires_grad_(False)})
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    style, weights = torch.randn(1, 4, 4), {"content": 1.0, "style": 10.0}

    def gram(y: Tensor) -> Tensor:
        features = y.flatten(2)
        return features.bmm(features.transpose(1, 2)) / features[0].numel()

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        y = model["net"](x)
        fy, fx = model["vgg"](y), model["vgg"](x)
        content = weights["content"] * F.mse_loss(fy, fx)
        target = style.expand(len(x), -1, -1)
        styled = weights["style"] * F.mse_loss(gram(fy), target)
        total = content + styled
        total.backward()
        optimizer.step()
        return {"content": content, "style": styled}

    def between(call: int) -> None:
        weights["style"] *= 2

    return Script(train_step, model, optimizer, [(x,) for x, _ in _batches()], between)


@program("U-Net", "skips, BatchNorm, Dice and BCE, ReduceLROnPlateau by a validation score")
def unet() -> Script:
    class Double(nn.Sequential):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
            )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inc, self.down, self.pool = Double(3, 4), Double(4, 8), nn.MaxPool2d(2)
            self.up, self.conv = nn.ConvTranspose2d(8, 4, 2, 2), Double(8, 4)
            self.outc = nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x1 = self.inc(x)
            x2 = self.up(self.down(self.pool(x1)))
            return self.outc(self.conv(torch.cat([x1, x2], dim=1)))

    model, criterion = UNet(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-8)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)

    def dice(a: Tensor, b: Tensor) -> Tensor:
        inter = 2 * (a * b).sum(dim=(-1, -2))
        sums = a.sum(dim=(-1, -2)) + b.sum(dim=(-1, -2))
        sums = torch.where(sums == 0, inter, sums)
        return ((inter + 1e-6) / (sums + 1e-6)).mean()

    def train_step(model: Any, optimizer: Any, x: Tensor, mask: Tensor) -> Tensor:
        pred = model(x)
        loss = criterion(pred.squeeze(1), mask) + 1 - dice(torch.sigmoid(pred.squeeze(1)), mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    batches = [(x, (x[:, 0] > 0).to(x.dtype)) for x, _ in _batches(rows=2)]

    @torch.no_grad()
    def between(call: int) -> Any:
        model.eval()
        with whole(model):
            score = dice(
                (torch.sigmoid(model(batches[0][0])) > 0.5).double().squeeze(1), batches[0][1]
            )
        model.train()
        scheduler.step(score)
        return score

    return Script(train_step, model, optimizer, batches, between)


@program("siamese_network", "one network called twice; a pair of images; BCE on a sigmoid")
def siamese() -> Script:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = (
                nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()),
                mlp(288, 8, 1),
            )

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.sigmoid(self.head(torch.cat((self.body(a), self.body(b)), 1)))

    model, criterion = Siamese(), nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def train_step(model: Any, optimizer: Any, one: Tensor, two: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        outputs = model(one, two).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (
            torch.randn(4, 1, 8, 8),
            torch.randn(4, 1, 8, 8),
            torch.tensor([0.0, 1.0, 1.0, 0.0]).double(),
        )
        for _ in range(CALLS)
    ]
    return Script(train_step, model, optimizer, batches)


@program("knowledge distillation", "a frozen teacher beside the student; a temperature that falls")
def distillation() -> Script:
    teacher, student = mlp(8, 16, CLASSES), mlp(8, 8, CLASSES)
    model = nn.ModuleDict({"teacher": teacher.eval().requires_grad_(False), "student": student})
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    class Config:
        T, alpha = 4.0, 0.5

    cfg = Config()

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(model["teacher"](x) / cfg.T, dim=-1)
        logits = model["student"](x)
        soft = (
            F.kl_div(F.log_softmax(logits / cfg.T, dim=-1), wanted, reduction="batchmean")
            * cfg.T**2
        )
        loss = cfg.alpha * soft + (1 - cfg.alpha) * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        cfg.T = max(1.0, cfg.T * 0.8)

    dtype = torch.get_default_dtype()
    batches = [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]
    return Script(train_step, model, optimizer, batches, between)
