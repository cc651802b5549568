"""Sample calls of convolutions, pooling and interpolation; see `rules.samples`."""

from __future__ import annotations

from tutti.rules.samples.sample import Sample, f, ints, positive, sample


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


_WINDOWS = ([1, 1], [1, 1], [1, 1])  # dilation, padding, stride
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
    sample("_adaptive_avg_pool3d", f(4, 6, 4, 4, 4), [2, 2, 2]),
    sample("_adaptive_avg_pool3d_backward", f(4, 6, 2, 2, 2), f(4, 6, 4, 4, 4)),
    sample("adaptive_max_pool3d", f(4, 6, 4, 4, 4), [2, 2, 2]),
    sample("adaptive_max_pool3d_backward", f(4, 6, 2, 2, 2), f(4, 6, 4, 4, 4),
           ints(64, 4, 6, 2, 2, 2)),
    sample("max_unpool2d", f(4, 6, 2, 2), ints(16, 4, 6, 2, 2), [4, 4]),
    sample("max_unpool3d", f(4, 6, 2, 2, 2), ints(64, 4, 6, 2, 2, 2), [4, 4, 4], [2, 2, 2],
           [0, 0, 0]),
    sample("fractional_max_pool2d", f(4, 6, 8, 8), [2, 2], [3, 3], positive(4, 6, 2)),
    sample("fractional_max_pool2d", f(6, 8, 8), [2, 2], [3, 3], positive(1, 6, 2)),
    sample("fractional_max_pool2d_backward", f(4, 6, 3, 3), f(4, 6, 8, 8), [2, 2], [3, 3],
           ints(64, 4, 6, 3, 3)),
    sample("fractional_max_pool3d", f(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2], positive(4, 6, 3)),
    sample("fractional_max_pool3d_backward", f(4, 6, 2, 2, 2), f(4, 6, 4, 4, 4), [2, 2, 2],
           [2, 2, 2], ints(64, 4, 6, 2, 2, 2)),
    sample("im2col", f(4, 6, 5, 4), [2, 3], *_WINDOWS),
    sample("im2col", f(6, 5, 4), [2, 3], *_WINDOWS),
    sample("col2im", f(4, 36, 24), [5, 4], [2, 3], *_WINDOWS),
    sample("col2im", f(36, 24), [5, 4], [2, 3], *_WINDOWS),
]  # fmt: skip

_LINE, _PLANE, _SPACE = [4, 6, 4], [4, 6, 4, 4], [4, 6, 4, 4, 4]


def _resized(op: str, image: list[int], *rest: bool) -> list[Sample]:
    """A resize to twice the size, and its gradient."""
    twice = [2 * n for n in image[2:]]
    return [
        sample(op, f(*image), twice, *rest),
        sample(f"{op}_backward", f(*image[:2], *twice), twice, image, *rest),
    ]


INTERPOLATION = [
    *(call for op in ("upsample_nearest", "_upsample_nearest_exact")
      for image, dims in ((_LINE, "1d"), (_PLANE, "2d"), (_SPACE, "3d"))
      for call in _resized(op + dims, image)),
    *_resized("upsample_linear1d", _LINE, False),
    *_resized("upsample_bilinear2d", _PLANE, False),
    *_resized("upsample_trilinear3d", _SPACE, True),
    *_resized("upsample_bicubic2d", _PLANE, True),
    *_resized("_upsample_bilinear2d_aa", _PLANE, False),
    *_resized("_upsample_bicubic2d_aa", _PLANE, False),
    sample("grid_sampler_2d", f(4, 6, 5, 4), f(4, 3, 6, 2), 0, 0, False),
    sample("grid_sampler_2d_backward", f(4, 6, 3, 6), f(4, 6, 5, 4), f(4, 3, 6, 2), 0, 1, True,
           [True, True]),
    sample("grid_sampler_2d_backward", f(4, 6, 3, 6), f(4, 6, 5, 4), f(4, 3, 6, 2), 2, 0, True,
           [False, True]),
    sample("grid_sampler_3d", f(4, 2, 3, 4, 3), f(4, 2, 3, 2, 3), 0, 1, False),
    sample("grid_sampler_3d_backward", f(4, 2, 2, 3, 2), f(4, 2, 3, 4, 3), f(4, 2, 3, 2, 3), 0, 0,
           True, [True, True]),
    sample("affine_grid_generator", f(4, 2, 3), [4, 6, 3, 5], False),
    sample("affine_grid_generator", f(4, 3, 4), [4, 1, 3, 2, 2], True),
]  # fmt: skip
