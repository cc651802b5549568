"""Sample calls of the ops that exist on a GPU only, in their dtypes there."""

from __future__ import annotations

from tutti.rules.samples.sample import Sample, half, ints, sample, single

_Q, _K, _LONG = half(4, 6, 64, 16), half(4, 6, 96, 16), half(4, 6, 40, 16)
_BIAS, _LSE, _SEED = half(4, 6, 64, 96), single(4, 6, 64), ints(9)
_SDPA = "_scaled_dot_product"
_ALL = [True, True, True, False]


def _flash(causal: bool) -> list[Sample]:
    backward = (0.0, causal, ints(9, 2), ints(9))
    return [
        sample(f"{_SDPA}_flash_attention", _Q, _Q, _Q, 0.0, causal),
        sample(f"{_SDPA}_flash_attention_backward", _Q, _Q, _Q, _Q, _Q, _LSE, None, None, 64, 64,
               *backward),
    ]  # fmt: skip


def _efficient(causal: bool) -> list[Sample]:
    return [
        sample(f"{_SDPA}_efficient_attention", _Q, _Q, _Q, None, True, 0.0, causal),
        sample(f"{_SDPA}_efficient_attention_backward", _Q, _Q, _Q, _Q, None, _Q, _LSE, _SEED, _SEED,
               0.0, _ALL, causal),
    ]  # fmt: skip


def _cudnn(causal: bool) -> list[Sample]:
    lse = single(4, 6, 64, 1)
    return [
        sample(f"{_SDPA}_cudnn_attention", _Q, _Q, _Q, None, True, 0.0, causal),
        sample(f"{_SDPA}_cudnn_attention_backward", _Q, _Q, _Q, _Q, _Q, lse, _SEED, _SEED, None, None,
               None, 64, 64, 0.0, causal),
    ]  # fmt: skip


GPU = [
    *(call for causal in (False, True) for call in _flash(causal)),
    *(call for causal in (False, True) for call in _efficient(causal)),
    *(call for causal in (False, True) for call in _cudnn(causal)),
    sample(f"{_SDPA}_efficient_attention", _Q, _K, _K, _BIAS, True),
    sample(f"{_SDPA}_efficient_attention", _LONG, _K, _K, None, True),
    sample(f"{_SDPA}_efficient_attention_backward", _Q, _Q, _K, _K, _BIAS, _Q, _LSE, _SEED, _SEED, 0.0,
           _ALL),
    sample("_fused_rms_norm_backward", single(4, 8, 12), single(4, 8, 12), [12], single(4, 8, 1),
           single(12), [True, True]),
]  # fmt: skip
