"""Packages as they are, in small scripts as their pages show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, SINGLE, Register, Script, whole
from benchmarks.programs.scripts.blocks import CLASSES, GPT, VOCAB, mlp, tokens, vectors

program = Register("packaged")


def _batches() -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]


def _step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def _with(make: Callable[[Any], Any]) -> Script:
    model = mlp(8, 16, CLASSES, act=nn.Tanh)
    return Script(_step, model, make(model.parameters()), _batches())


def _schedule_free(name: str, block: Any, **options: Any) -> Script:
    import schedulefree

    made = _with(lambda p: getattr(schedulefree, name)(p, **options))
    model, optimizer, held_out = made.model, made.optimizer, made.batches[0]
    optimizer.train()

    @torch.no_grad()
    def between(call: int) -> Any:
        with block(model, slots=True):
            model.eval(), optimizer.eval()
            loss = F.cross_entropy(model(held_out[0]), held_out[1])
            model.train(), optimizer.train()
        return loss

    made.between = between
    return made


@program(
    "schedulefree AdamW",
    "optimizer.train() and eval() around an evaluation",
    packages=("schedulefree",),
)
def schedulefree_adamw() -> Script:
    return _schedule_free("AdamWScheduleFree", whole, lr=1e-2, warmup_steps=2)


@program("schedulefree SGD", "the same, with SGD", packages=("schedulefree",))
def schedulefree_sgd() -> Script:
    return _schedule_free("SGDScheduleFree", whole, lr=1e-1)


@program("schedulefree RAdam", "the same, with RAdam", packages=("schedulefree",))
def schedulefree_radam() -> Script:
    return _schedule_free("RAdamScheduleFree", whole, lr=1e-2)


@program("prodigyopt Prodigy", "an estimate of the distance, by .item()", packages=("prodigyopt",))
def prodigyopt() -> Script:
    import prodigyopt

    return _with(lambda p: prodigyopt.Prodigy(p, lr=1.0))


@program("lion-pytorch Lion", "its update function is an attribute", packages=("lion_pytorch",))
def lion_pytorch() -> Script:
    from lion_pytorch import Lion

    return _with(lambda p: Lion(p, lr=1e-3, weight_decay=1e-2))


def _of_pytorch_optimizer(name: str, **options: Any) -> Callable[[], Script]:
    def build() -> Script:
        import pytorch_optimizer

        return _with(lambda p: getattr(pytorch_optimizer, name)(p, **options))

    return build


for _name, _idiom, _options in (
    ("SOAP", "eigenbases in lists, made anew now and then", {"lr": 1e-2, "precondition_frequency": 2}),
    ("ScalableShampoo", "preconditioners as objects", {"lr": 1e-2, "start_preconditioning_step": 2}),
    ("Lamb", "a trust ratio", {"lr": 1e-2}),
    ("Lion", "signs", {"lr": 1e-3}),
    ("AdaBelief", "a variance about the mean", {"lr": 1e-2}),
    ("Adan", "three moments", {"lr": 1e-2}),
    ("AdEMAMix", "a slow and a fast mean", {"lr": 1e-2}),
    ("ADOPT", "a first step that only squares", {"lr": 1e-2}),
    ("Ranger21", "much at once", {"lr": 1e-2, "num_iterations": 10}),
    ("ScheduleFreeAdamW", "its own schedule-free", {"lr": 1e-2}),
    ("MADGRAD", "dual averaging, k in the state", {"lr": 1e-2}),
    ("NovoGrad", "a norm as second moment", {"lr": 1e-2}),
):  # fmt: skip
    program(f"pytorch-optimizer {_name}", _idiom, packages=("pytorch_optimizer",))(
        _of_pytorch_optimizer(_name, **_options)
    )


@program(
    "x-transformers",
    "a decoder with rotary positions behind AutoregressiveWrapper; generate in between",
    packages=("x_transformers",),
    within=SINGLE,
)
def x_transformers() -> Script:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    net = TransformerWrapper(
        num_tokens=VOCAB,
        max_seq_len=16,
        attn_layers=Decoder(dim=8, depth=1, heads=2, attn_dim_head=32, rotary_pos_emb=True),
    )
    model = AutoregressiveWrapper(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)

    def train_step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        model.train()
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def between(call: int) -> Any:
        if call % 2:
            return None
        model.eval()
        with torch.no_grad(), whole(model):
            return model.generate(torch.ones(1, 2, dtype=torch.long), 3, temperature=0.0)

    return Script(train_step, model, optimizer, [(tokens(i)[0],) for i in range(CALLS)], between)


@program(
    "ema-pytorch",
    "EMA(model, update_every=2), updated outside and evaluated",
    packages=("ema_pytorch",),
)
def ema_pytorch() -> Script:
    from ema_pytorch import EMA

    made = _with(lambda p: torch.optim.Adam(p, lr=1e-2))
    ema = EMA(made.model, beta=0.9, update_after_step=1, update_every=2)

    @torch.no_grad()
    def between(call: int) -> Any:
        with whole(made.model):
            ema.update()
        return ema(made.batches[0][0])

    made.between = between
    return made


@program(
    "vector-quantize-pytorch",
    "a codebook by moving averages, if self.initted",
    packages=("vector_quantize_pytorch",),
    within=SINGLE,
)
def vector_quantize() -> Script:
    from vector_quantize_pytorch import VectorQuantize

    model = nn.ModuleDict(
        {
            "enc": mlp(8, 8),
            "vq": VectorQuantize(dim=8, codebook_size=16, decay=0.8),
            "dec": mlp(8, 8),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        quantized, indices, commit = model["vq"](model["enc"](x)[:, None])
        loss = F.l1_loss(model["dec"](quantized[:, 0]), x) + commit.sum()
        loss.backward()
        optimizer.step()
        return loss, indices

    return Script(train_step, model, optimizer, [(x,) for x, _ in _batches()])


@program("peft LoRA", "get_peft_model of a GPT-2", packages=("peft", "accelerate"), within=SINGLE)
def peft() -> Script:
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    base = transformers.GPT2LMHeadModel(config)
    lora = LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [({"input_ids": tokens(i)[0], "labels": tokens(i)[0].clone()},) for i in range(CALLS)]
    return Script(train_step, model, optimizer, batches)


@program(
    "accelerate's prepare",
    "a script with accelerator.backward and clip_grad_norm_, as it stands",
    packages=("accelerate",),
)
def accelerated() -> Script:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = GPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        _, loss = model(x, y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)])
