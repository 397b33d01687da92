"""Convolutions and pools."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import dtype_argument, line, of_rank


@line(1.5)
def convolution(w: Writer) -> str:
    """Convolutions and pools over one axis and over two."""
    a = w.pick(of_rank(3, 4))
    x = w.tensor(a)
    dtype = dtype_argument(x)
    v = w.fresh()
    kernel, stride, padding = w.rng.choice([1, 2, 3]), w.rng.choice([1, 1, 2]), w.rng.choice([0, 1])
    if x.dim() == 4:
        channels = x.shape[1]
        groups = w.rng.choice([1, channels])
        conv = f"nn.Conv2d({channels}, {2 * channels}, {kernel}, stride={stride}, padding={padding}, groups={groups}{dtype})"
        forms = [
            f"{w.layer(conv)}({a})",
            f"F.max_pool2d({a}, 2, {stride}, padding={padding})",
            f"F.avg_pool2d({a}, 2, padding={padding}, count_include_pad={w.rng.choice([True, False])})",
            f"F.adaptive_avg_pool2d({a}, 1)",
            f"F.interpolate({a}, scale_factor=2, mode='nearest')",
            f"F.pixel_unshuffle({a}, 1)",
            f"F.conv2d({a}, {a}[:1, :, :1, :1])",
        ]
    else:
        channels = x.shape[2]
        groups = w.rng.choice([1, 1, 2, channels])
        conv = (
            f"nn.Conv1d({channels}, {2 * channels}, {kernel}, stride={stride}, padding={padding}, groups={groups}, "
            f"dilation={w.rng.choice([1, 1, 2])}, bias={w.rng.choice([True, False])}{dtype})"
        )
        forms = [
            f"{w.layer(conv)}({a}.transpose(1, 2))",
            f"F.relu({w.layer(conv)}({a}.mT)).mT",
            f"F.max_pool1d({a}, 2)",
            f"F.avg_pool1d({a}, 2, ceil_mode=True)",
            f"F.adaptive_avg_pool1d({a}, 2)",
            f"F.conv1d(F.pad({a}.mT, (2, 0)), {w.layer(f'nn.Parameter(torch.randn({channels}, 1, 3{dtype}))')}, groups={channels})",
        ]
    return f"{v} = {w.rng.choice(forms)}"
