"""Sample calls of normalizations and fused attention; see `rules.samples`."""

from __future__ import annotations

from tutti.rules.samples.sample import f, positive, sample

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
    sample("native_group_norm", f(4, 6), f(6), None, 4, 6, 1, 6, 1e-5),
    sample("native_group_norm", f(4, 6), f(6), f(6), 4, 6, 1, 1, 1e-5),
    sample("native_group_norm_backward", f(4, 6, 2, 3), f(4, 6, 2, 3), f(4, 2), positive(4, 2), f(6),
           4, 6, 6, 2, [True, True, True]),
    sample("native_group_norm_backward", f(4, 6, 2, 3), f(4, 6, 2, 3), f(4, 2), positive(4, 2), None,
           4, 6, 6, 2, [True, False, False]),
    sample("_weight_norm_interface", f(4, 6, 12), positive(4, 1, 1)),
    sample("_weight_norm_interface", f(4, 6), positive(1, 6), 1),
    sample("_weight_norm_interface_backward", f(4, 6, 12), f(4, 6, 12), f(4, 1, 1),
           positive(4, 1, 1), 0),
    sample("_weight_norm_interface_backward", f(4, 6), f(4, 6), f(1, 6), positive(1, 6), 1),
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
