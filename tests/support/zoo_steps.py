"""The zoo's batches and training steps: ordinary PyTorch code, as a user would write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

BATCH, SEQ, VOCAB, NUM_CLASSES = 8, 16, 64, 8
MAX_NORM = 0.05  # far below every first gradient norm here: see tests/test_zoo.py
IGNORED = -100

Batch = tuple[Tensor, ...]

# --- batches -----------------------------------------------------------------------------------


def lengths(seq: int, which: int, rows: int = BATCH) -> Tensor:
    """Valid positions per row: a ramp up to `seq` in equal steps, falling in every other batch."""
    ramp = seq * torch.arange(1, rows + 1) // rows
    return ramp.flip(0) if which % 2 else ramp


def valid(seq: int, which: int, rows: int = BATCH) -> Tensor:
    """Bool mask [batch, seq] that is true at the valid positions."""
    return torch.arange(seq) < lengths(seq, which, rows)[:, None]


def token_batch(which: int, *, seq: int = SEQ, rows: int = BATCH) -> Batch:
    """Random tokens and targets, both [batch, seq]; targets beyond each row's length ignored."""
    tokens, targets = torch.randint(0, VOCAB, (2, rows, seq))
    return tokens, targets.masked_fill(~valid(seq, which, rows), IGNORED)


def padded_batch(which: int) -> Batch:
    """Tokens, attention mask (0 at the padding behind each row) and labels, all [batch, seq]."""
    tokens, labels = token_batch(which)
    keep = valid(SEQ, which)
    return tokens.masked_fill(~keep, 0), keep.long(), labels


def translation_batch(which: int) -> Batch:
    """Source tokens [batch, seq], their attention mask, and target tokens [batch, seq/2]."""
    tokens, mask, _ = padded_batch(which)
    return tokens, mask, token_batch(which + 1, seq=SEQ // 2)[1]


def decoder_batch(which: int) -> Batch:
    """Source tokens, target tokens and next-token labels for `nn.Transformer`."""
    source, _ = token_batch(which)
    return source, *token_batch(which, seq=SEQ // 2)


def image_batch(which: int, *, rows: int = BATCH) -> Batch:
    """Images [batch, 3, 16, 16] and classes; one row of each batch is ignored."""
    classes = torch.randint(0, NUM_CLASSES, (rows,))
    classes[which] = IGNORED
    return torch.randn(rows, 3, 16, 16), classes


def vector_batch(which: int) -> Batch:
    """Vectors [batch, 16] and classes; one row of each batch is ignored."""
    images, classes = image_batch(which)
    return images[:, 0, 0], classes


# --- steps -------------------------------------------------------------------------------------


def update(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Tensor:
    """Backward, clip, step: the end of most training steps."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return loss


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the targets that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def plain_step(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> Tensor:
    """Inputs first, targets last; the loss is ours."""
    *inputs, targets = batch
    return update(model, optimizer, cross_entropy(model(*inputs), targets))


def labels_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss is the model's own."""
    return update(model, optimizer, model(inputs, labels=labels).loss)


def masked_step(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, mask: Tensor, labels: Tensor
) -> Tensor:
    """The loss is the model's own; padding is masked."""
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    return update(model, optimizer, loss)


def autocast_step(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Forward in bfloat16 where autocast says so."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(tokens), targets)
    return update(model, optimizer, loss)


def two_losses_step(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Two calls of backward: cross-entropy, then a penalty on the logits' normalizer."""
    logits = model(tokens)
    loss = cross_entropy(logits, targets)
    penalty = 1e-2 * logits.logsumexp(-1).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    penalty.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return loss + penalty


def accumulate_step(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Gradient accumulation as users write it: chunks of the batch, one count for all of them."""
    optimizer.zero_grad()
    count, total = (targets != IGNORED).sum(), torch.zeros(())
    for some_tokens, some_targets in zip(tokens.chunk(2), targets.chunk(2), strict=True):
        logits = model(some_tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, some_targets.flatten(), reduction="sum") / count
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return total


@torch.no_grad()
def eval_step(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """No optimizer, no backward."""
    return cross_entropy(model(tokens), targets)
