"""Sample calls of normalizations, convolutions, pooling and fused attention; see `rules.samples`."""

from __future__ import annotations

from tutti.rules.sample import Sample, f, ints, positive, sample

_LAYER = [12, 6]
NORMS = [
    sample("native_layer_norm", f(4, 8, 12), [12], f(12), f(12), 1e-5),
    sample("native_layer_norm", f(4, 8, 12, 6), _LAYER, None, None, 1e-5),
    sample("native_layer_norm", f(4, 8, 12), [12], f(12), None, 1e-5),
    sample("native_layer_norm_backward", f(4, 8, 12), f(4, 8, 12), [12], f(4, 8, 1), positive(4, 8, 1),
           f(12), f(12), [True, True, True]),
    sample("native_layer_norm_backward", f(4, 8, 12), f(4, 8, 12), [12], f(4, 8, 1), positive(4, 8, 1),
           None, None, [True, False, False]),
    sample("native_layer_norm_backward", f(4, 12, 6), f(4, 12, 6), _LAYER, f(4, 1, 1),
           positive(4, 1, 1), f(12, 6), None, [True, True, False]),
    sample("_fused_rms_norm", f(4, 8, 12), [12], f(12), 1e-5),
    sample("_fused_rms_norm", f(4, 12, 6), _LAYER, None, 1e-5),
    sample("_native_batch_norm_legit_functional", f(4, 6, 2, 3), f(6), f(6), f(6), positive(6), True,
           0.1, 1e-5),
    sample("_native_batch_norm_legit_functional", f(4, 6), None, None, f(6), positive(6), True, 0.1,
           1e-5),
    sample("native_batch_norm", f(4, 6, 2, 3), f(6), f(6), f(6), positive(6), False, 0.1, 1e-5),
    sample("native_batch_norm", f(4, 6, 2, 3), f(6), None, None, None, True, 0.1, 1e-5),
    *(sample("native_batch_norm_backward", f(4, 6, 2, 3), f(4, 6, 2, 3), w, f(6), positive(6), f(6),
             positive(6), training, 1e-5, [True, w is not None, True])
      for training in (True, False) for w in (f(6), None)),
    sample("native_batch_norm_backward", f(4, 6, 2, 3), f(4, 6, 2, 3), f(6), f(6), positive(6), f(0),
           f(0), False, 1e-5, [True, True, True]),
    sample("native_group_norm", f(4, 6, 2, 3), f(6), f(6), 4, 6, 6, 2, 1e-5),
    sample("native_group_norm", f(4, 6, 2, 3), None, None, 4, 6, 6, 3, 1e-5),
    sample("native_group_norm_backward", f(4, 6, 2, 3), f(4, 6, 2, 3), f(4, 2), positive(4, 2), f(6),
           4, 6, 6, 2, [True, True, True]),
    sample("native_group_norm_backward", f(4, 6, 2, 3), f(4, 6, 2, 3), f(4, 2), positive(4, 2), None,
           4, 6, 6, 2, [True, False, False]),
]  # fmt: skip


def _convolutions() -> list[Sample]:
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    turned = ([2, 2], [0, 0], [1, 1], True, [0, 0])
    calls = []
    for w, bias, how, num_groups, out in (
        (f(12, 6, 3, 3), f(12), plain, 1, f(4, 12, 5, 5)),
        (f(12, 6, 3, 3), None, plain, 1, f(4, 12, 5, 5)),
        (f(6, 1, 3, 3), f(6), plain, 6, f(4, 6, 5, 5)),
        (f(12, 3, 3, 3), f(12), plain, 2, f(4, 12, 5, 5)),
        (f(12, 1, 3, 3), None, plain, 6, f(4, 12, 5, 5)),
        (f(6, 12, 2, 2), f(12), turned, 1, f(4, 12, 10, 10)),
    ):
        x = f(4, 6, 5, 5)
        calls.append(sample("convolution", x, w, bias, *how, num_groups))
        mask = [True, True, bias is not None]
        sizes = [out.shape[1]] if bias is not None else None
        calls.append(sample("convolution_backward", out, x, w, sizes, *how, num_groups, mask))
    line = ([1], [1], [1], False, [0], 1)
    calls.append(sample("convolution", f(4, 6, 8), f(12, 6, 3), None, *line))
    calls.append(sample("convolution_backward", f(4, 12, 8), f(4, 6, 8), f(12, 6, 3), None, *line,
                        [False, True, False]))  # fmt: skip
    return calls


_POOL = ([2, 2], [2, 2], [0, 0])
IMAGES = [
    *_convolutions(),
    sample("max_pool2d_with_indices", f(4, 6, 8, 8), [2, 2], [2, 2]),
    sample("max_pool2d_with_indices", f(6, 8, 8), [2, 2], [2, 2]),
    sample("max_pool2d_with_indices_backward", f(4, 6, 4, 4), f(4, 6, 8, 8), *_POOL, [1, 1], False,
           ints(64, 4, 6, 4, 4)),
    sample("avg_pool2d", f(4, 6, 8, 8), [2, 2], [2, 2]),
    sample("avg_pool2d_backward", f(4, 6, 4, 4), f(4, 6, 8, 8), *_POOL, False, True, None),
    sample("_adaptive_avg_pool2d", f(4, 6, 8, 8), [2, 2]),
    sample("_adaptive_avg_pool2d_backward", f(4, 6, 2, 2), f(4, 6, 8, 8)),
    sample("adaptive_max_pool2d", f(4, 6, 8, 8), [2, 2]),
    sample("adaptive_max_pool2d_backward", f(4, 6, 2, 2), f(4, 6, 8, 8), ints(64, 4, 6, 2, 2)),
    sample("max_pool3d_with_indices", f(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2]),
    sample("max_pool3d_with_indices_backward", f(4, 6, 2, 2, 2), f(4, 6, 4, 4, 4), [2, 2, 2],
           [2, 2, 2], [0, 0, 0], [1, 1, 1], False, ints(64, 4, 6, 2, 2, 2)),
    sample("avg_pool3d", f(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2]),
    sample("avg_pool3d_backward", f(4, 6, 2, 2, 2), f(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2],
           [0, 0, 0], False, True, None),
    sample("upsample_nearest1d", f(4, 6, 4), [8]),
    sample("upsample_nearest1d_backward", f(4, 6, 8), [8], [4, 6, 4]),
    sample("upsample_bicubic2d", f(4, 6, 4, 4), [8, 8], True),
    sample("upsample_bicubic2d_backward", f(4, 6, 8, 8), [8, 8], [4, 6, 4, 4], True),
    sample("upsample_nearest2d", f(4, 6, 4, 4), [8, 8]),
    sample("upsample_bilinear2d", f(4, 6, 4, 4), [8, 8], False),
    sample("upsample_nearest2d_backward", f(4, 6, 8, 8), [8, 8], [4, 6, 4, 4]),
    sample("upsample_bilinear2d_backward", f(4, 6, 8, 8), [8, 8], [4, 6, 4, 4], False),
]  # fmt: skip

_Q, _KV, _E, _LSE = f(4, 6, 8, 16), f(4, 3, 12, 16), f(4, 6, 8, 16), f(4, 6, 8)
_SELF = f(4, 6, 8, 16)
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION = [
    sample(_FLASH, _Q, _KV, _KV),
    sample(_FLASH, _SELF, _SELF, _SELF, 0.0, True),
    *(sample(_FLASH, _Q, _KV, _KV, attn_mask=f(*mask), scale=0.3)
      for mask in ((4, 6, 8, 12), (4, 1, 8, 12), (1, 1, 8, 12), (8, 12), (4, 1, 1, 12))),
    sample(f"{_FLASH}_backward", _SELF, _SELF, _SELF, _SELF, _SELF, _LSE, 0.0, False),
    sample(f"{_FLASH}_backward", _SELF, _SELF, _SELF, _SELF, _SELF, _LSE, 0.0, True),
    sample(f"{_FLASH}_backward", _SELF, _SELF, f(4, 6, 12, 16), f(4, 6, 12, 16), _SELF, _LSE, 0.0,
           False, attn_mask=f(4, 1, 8, 12)),
]  # fmt: skip
