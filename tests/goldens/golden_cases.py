"""The cases of make_goldens.py: for each op of ops/ops.def, inputs and PyTorch's function."""
import math
import re
import zlib

import numpy as np
import torch
import torch.nn.functional as F

OPS = {}  # name -> function that gives the op's list of Case


class Case:
    """run(*inputs) gives a tensor or a tuple of them."""

    def __init__(self, name, inputs, run, length=1, low=None, orders=None, cuda_only=False, **attrs):
        self.name, self.inputs, self.run, self.length = name, inputs, run, length
        self.cuda_only = cuda_only  # the CPU's autocast lacks this promotion
        self.low = [i for i, x in enumerate(inputs) if x.dtype == np.float32] if low is None else low
        self.orders = orders or {}
        self.attrs = attrs
        assert re.fullmatch(r"\S+", name), name


def golden(function):
    name = function.__name__.removeprefix("op_")
    OPS[name] = lambda: function(np.random.default_rng(zlib.crc32(name.encode())))
    return function


# ---- inputs -------------------------------------------------------------------------------------

def real(rng, shape, lo=-2.0, hi=2.0):
    return rng.uniform(lo, hi, shape).astype(np.float32)


def grid(rng, shape):
    """Distinct multiples of 1/16 that are exact in every dtype, none of them 0: no ties, no kinks."""
    n = math.prod(shape)
    assert n <= 254, shape
    half = np.arange(1, (n + 1) // 2 + 1)
    k = np.concatenate([half, -half])[:n]
    return (rng.permutation(k) / 16).astype(np.float32).reshape(shape)


def whole(rng, shape, lo=-2, hi=2):
    """Small whole numbers: many ties and zeros."""
    return rng.integers(lo, hi + 1, shape).astype(np.float32)


def values(*numbers):
    return np.array(numbers, np.float32)


def index(rng, shape, bound):
    return rng.integers(0, bound, shape).astype(np.int64)


def away_from_zero(draw, pre_activation, margin=0.05):
    """Draws until no pre-activation is so near 0 that rounding could change its sign."""
    for _ in range(10000):
        arrays = draw()
        if pre_activation(*map(torch.from_numpy, arrays)).abs().min() > margin:
            return arrays
    raise RuntimeError("no draw keeps clear of 0")


# ---- elementwise --------------------------------------------------------------------------------

def unary(name, f, lo=-3.0, hi=3.0, edges=(0.0, -0.0, 1.0, -1.0, 1e-3, -1e-3, 20.0, -20.0)):
    def cases(rng):
        return [
            Case("matrix", [real(rng, (3, 5), lo, hi)], f),
            Case("0-d", [real(rng, (), lo, hi)], f),
            Case("odd", [real(rng, (2, 1, 37), lo, hi)], f),
            Case("transposed", [real(rng, (5, 3), lo, hi)], f, orders={0: (1, 0)}),
            Case("edges", [values(*edges)], f),
        ]
    cases.__name__ = "op_" + name
    golden(cases)


INF, NAN = math.inf, math.nan
SPECIAL = (0.0, -0.0, 1.0, -1.0, INF, -INF, NAN)
POSITIVE = (1.0, 1e-3, 100.0, 0.0, INF)
unary("neg", torch.neg, edges=SPECIAL)
unary("abs", torch.abs, edges=SPECIAL)
unary("exp", torch.exp, edges=(0.0, -0.0, 1e-3, 20.0, -20.0, 100.0, -110.0, INF, -INF, NAN))
unary("log", torch.log, 0.2, 4.0, POSITIVE)
unary("sqrt", torch.sqrt, 0.2, 4.0, POSITIVE)
unary("relu", torch.relu, edges=SPECIAL)
unary("gelu", F.gelu)
unary("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
unary("silu", F.silu)
unary("sigmoid", torch.sigmoid)
unary("tanh", torch.tanh)
unary("erf", torch.erf)


def binary(name, f, draw, edges, number=0.75):
    """edges: two arrays of ties and special values."""
    def cases(rng):
        list_ = [
            Case("same", [draw(rng, (3, 5)), draw(rng, (3, 5))], f),
            Case("row", [draw(rng, (4, 7)), draw(rng, (7,))], f, length=4),
            Case("broadcast", [draw(rng, (4, 1, 3)), draw(rng, (2, 1))], f, length=12),
            Case("0-d", [draw(rng, (7,)), draw(rng, ())], f, length=7),
            Case("transposed", [draw(rng, (5, 3)), draw(rng, (5, 3))], f, orders={1: (1, 0)}),
            Case("mixed", [draw(rng, (3, 5)), draw(rng, (3, 5))], f, low=[0]),
            Case("mixed_0-d", [draw(rng, (7,)), draw(rng, ())], f, length=7, low=[0]),
            Case("number_right", [draw(rng, (3, 5))], lambda x: f(x, number), number_right=number),
            Case("number_left", [draw(rng, (3, 5))], lambda x: f(number, x), number_left=number),
        ]
        if edges:
            list_.append(Case("edges", [values(*edges[0]), values(*edges[1])], f))
        return list_
    cases.__name__ = "op_" + name
    golden(cases)


def tensor_of(number, like):
    return torch.tensor(number, dtype=like.dtype, device=like.device)


def with_number(f):
    """For torch functions that take tensors only: a number becomes a 0-d tensor."""
    def g(a, b):
        if not torch.is_tensor(a):
            a = tensor_of(a, b)
        if not torch.is_tensor(b):
            b = tensor_of(b, a)
        return f(a, b)
    return g


TIES = ((1.0, 2.0, 0.0, -1.0, 0.0, INF, -INF), (1.0, 1.0, 0.0, -1.0, -0.0, INF, 1.0))
NANS = ((NAN, 1.0, NAN, 0.5), (1.0, NAN, NAN, 0.5))
TIES_AND_NANS = (TIES[0] + NANS[0], TIES[1] + NANS[1])
binary("add", lambda a, b: a + b, real, None)
binary("sub", lambda a, b: a - b, real, None)
binary("mul", lambda a, b: a * b, real, ((0.0, 2.0, -3.0), (5.0, 0.0, 0.5)))
binary("div", lambda a, b: a / b, lambda rng, s: real(rng, s, 0.5, 2), ((0.0, 1.0, -1.0), (2.0, INF, 4.0)))
binary("pow", lambda a, b: a ** b, lambda rng, s: real(rng, s, 0.5, 2),
       ((0.0, 0.0, -2.0, 2.0, 1.0), (2.0, 0.0, 3.0, 0.0, 7.0)), number=2.5)
binary("maximum", with_number(torch.maximum), grid, TIES_AND_NANS)
binary("minimum", with_number(torch.minimum), grid, TIES_AND_NANS)
for _name, _f in (("eq", torch.eq), ("ne", torch.ne), ("lt", torch.lt), ("le", torch.le), ("gt", torch.gt),
                  ("ge", torch.ge)):
    binary(_name, with_number(_f), whole, TIES_AND_NANS, number=1.0)


@golden
def op_clamp(rng):
    def case(name, x, lo, hi):
        return Case(name, [x], lambda t: torch.clamp(t, lo, hi), lo="none" if lo is None else lo,
                    hi="none" if hi is None else hi)
    return [
        case("both", grid(rng, (3, 5)), -0.25, 0.25),
        case("low_only", grid(rng, (2, 3, 4)), -0.25, None),
        case("high_only", grid(rng, ()), None, 0.03125),
        case("bounds_and_specials", values(0.0, 1.0, -0.5, 0.5, 2.0, INF, -INF), 0.0, 1.0),
    ]


@golden
def op_where(rng):
    def mask(shape):
        return rng.integers(0, 2, shape).astype(bool)
    return [
        Case("same", [mask((3, 5)), real(rng, (3, 5)), real(rng, (3, 5))], torch.where),
        Case("broadcast", [mask((4, 1)), real(rng, (5,)), real(rng, ())], torch.where, length=20),
        Case("mixed", [mask((3, 5)), real(rng, (3, 5)), real(rng, (3, 5))], torch.where, low=[1]),
        Case("number_right", [mask((6,)), real(rng, (6,))], lambda c, a: torch.where(c, a, -1.5),
             number_right=-1.5),
        Case("number_left", [mask((6,)), real(rng, (6,))], lambda c, b: torch.where(c, -1.5, b),
             number_left=-1.5),
    ]


@golden
def op_cast(rng):
    return [Case("to_" + name, [real(rng, (3, 5))], lambda x, t=t: x.to(t), to=name)
            for t, name in ((torch.float16, "f16"), (torch.bfloat16, "bf16"), (torch.float32, "f32"),
                            (torch.float64, "f64"))]


# ---- reductions ---------------------------------------------------------------------------------

def reduction(name, f, correction=False):
    shapes = (((3, 5), None, False), ((3, 5), (1,), False), ((3, 5), (0,), True), ((2, 3, 4), (0, 2), False),
              ((1, 7, 1), (1,), False), ((300,), None, False), ((5, 41), (-1,), True))

    def cases(rng):
        list_ = []
        for shape, dims, keep in shapes:
            for c in ((1, 0) if correction and shape != (300,) else (1,)):
                length = math.prod(shape) if dims is None else math.prod(shape[d] for d in dims)
                attrs = {"dims": dims or (), "keepdim": int(keep)}
                if correction:
                    attrs["correction"] = c
                name_ = "x".join(map(str, shape)) + "_over_" + ("all" if dims is None else ",".join(map(str, dims)))
                list_.append(Case(name_ + (f"_correction_{c}" if correction else "") + ("_kept" if keep else ""),
                                  [real(rng, shape)],
                                  lambda x, dims=dims, keep=keep, c=c: f(x, dims, keep, c), length=length,
                                  **attrs))
        list_.append(Case("transposed", [real(rng, (6, 4))], lambda x: f(x, (1,), False, 1), length=6,
                          orders={0: (1, 0)}, dims=(1,), keepdim=0, **({"correction": 1} if correction else {})))
        return list_
    cases.__name__ = "op_" + name
    golden(cases)


reduction("sum", lambda x, d, k, c: x.sum() if d is None else x.sum(d, k))
reduction("mean", lambda x, d, k, c: x.mean() if d is None else x.mean(d, k))
reduction("var", lambda x, d, k, c: torch.var(x, d, correction=c, keepdim=k), correction=True)


@golden
def op_max(rng):
    def along(name, x, dim, keep):
        return Case(name, [x], lambda t: tuple(torch.max(t, dim, keep)), dim=dim, keepdim=int(keep))
    return [
        Case("all", [grid(rng, (4, 6))], torch.max, length=24),
        Case("all_ties", [whole(rng, (4, 6))], torch.max, length=24),
        along("along_0", grid(rng, (4, 6)), 0, False),
        along("along_-1_kept", grid(rng, (2, 3, 5)), -1, True),
        along("ties", whole(rng, (5, 9)), 1, False),
    ]


@golden
def op_argmax(rng):
    def along(name, x, dim, keep):
        return Case(name, [x], lambda t: torch.argmax(t, dim, keep), dim=dim, keepdim=int(keep))
    return [
        along("along_1", grid(rng, (4, 6)), 1, False),
        along("along_0_kept", grid(rng, (2, 3, 5)), 0, True),
        along("ties", whole(rng, (5, 9)), 1, False),
    ]


@golden
def op_sum_to(rng):
    def case(shape, sizes, length):
        return Case("x".join(map(str, shape)) + "_to_" + ("x".join(map(str, sizes)) or "0-d"),
                    [real(rng, shape)], lambda x: x.sum_to_size(sizes), length=length, sizes=sizes)
    return [case((4, 3, 5), (3, 1), 20), case((4, 3, 5), (5,), 12), case((3, 5), (3, 5), 1),
            case((2, 6), (1, 1), 12)]


# ---- products -----------------------------------------------------------------------------------

@golden
def op_matmul(rng):
    def case(name, a, b, length, orders=None):
        return Case(name, [real(rng, a, -1, 1), real(rng, b, -1, 1)], torch.matmul, length=length,
                    orders=orders)
    return [
        case("odd", (5, 7), (7, 3), 7),
        case("one", (1, 1), (1, 1), 1),
        case("long", (2, 200), (200, 3), 200),
        case("aligned", (8, 24), (24, 8), 24),
        case("left_transposed", (5, 7), (7, 3), 7, {0: (1, 0)}),
        case("right_transposed", (5, 7), (7, 3), 7, {1: (1, 0)}),
        case("both_transposed", (8, 8), (8, 16), 16, {0: (1, 0), 1: (1, 0)}),
        case("vector_matrix", (5,), (5, 3), 5),
        case("matrix_vector", (3, 5), (5,), 5),
        case("vector_vector", (9,), (9,), 9),
        case("batched", (3, 4, 5), (3, 5, 2), 5),
        case("batched_transposed", (2, 4, 5), (2, 5, 3), 5, {0: (0, 2, 1), 1: (2, 0, 1)}),
        case("matrix_for_every_batch", (2, 3, 4), (4, 5), 6),
        case("broadcast_batch", (2, 1, 3, 4), (3, 4, 2), 9),
    ]


ACTS = {"none": lambda z: z, "relu": torch.relu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "gelu": F.gelu, "silu": F.silu}


@golden
def op_linear(rng):
    def case(name, x, w, bias, act="none", orders=None):
        def draw():
            arrays = [real(rng, x, -1, 1), real(rng, w, -1, 1)]
            return arrays + [real(rng, (w[0],))] if bias else arrays
        arrays = away_from_zero(draw, F.linear) if act == "relu" else draw()
        return Case(name, arrays, lambda *t: ACTS[act](F.linear(*t)), length=max(w[1], w[0], math.prod(x[:-1])),
                    orders=orders, act=act)
    return [
        case("bias", (6, 9), (5, 9), True),
        case("no_bias", (6, 9), (5, 9), False),
        case("batched", (2, 3, 32), (16, 32), True),
        case("vector", (9,), (5, 9), True),
        case("x_transposed", (6, 9), (5, 9), True, orders={0: (1, 0)}),
        case("weight_transposed", (6, 9), (5, 9), True, orders={1: (1, 0)}),
    ] + [case("act_" + a, (6, 9), (5, 9), True, a) for a in ACTS if a != "none"] + [
        case("relu_no_bias", (4, 16), (8, 16), False, "relu"),
        case("gelu_tanh_no_bias", (4, 16), (8, 16), False, "gelu_tanh"),
    ]


@golden
def op_mlp(rng):
    def case(name, x, hidden, out, bias=True, act="gelu_tanh"):
        def draw():
            arrays = [real(rng, x, -1, 1), real(rng, (hidden, x[-1]), -1, 1), real(rng, (out, hidden), -1, 1)]
            return arrays + ([real(rng, (hidden,)), real(rng, (out,))] if bias else [])
        arrays = away_from_zero(draw, lambda x, w1, w2, b1=None, b2=None: F.linear(x, w1, b1)) if act == "relu" else draw()
        return Case(name, arrays,
                    lambda x, w1, w2, b1=None, b2=None: F.linear(ACTS[act](F.linear(x, w1, b1)), w2, b2),
                    length=max(hidden, x[-1], math.prod(x[:-1])) * 4, act=act)
    return [case("act_" + a, (5, 8), 16, 4, act=a) for a in ACTS if a != "none"] + [
        case("no_bias", (5, 8), 16, 4, bias=False), case("batched", (2, 3, 8), 24, 8),
    ]


# ---- shape --------------------------------------------------------------------------------------

@golden
def op_reshape(rng):
    return [
        Case("2x3x4_to_4x6", [real(rng, (2, 3, 4))], lambda x: x.reshape(4, -1), sizes=(4, -1)),
        Case("flatten_transposed", [real(rng, (4, 6))], lambda x: x.reshape(-1), orders={0: (1, 0)}, sizes=(-1,)),
        Case("0-d_to_1x1", [real(rng, ())], lambda x: x.reshape(1, 1), sizes=(1, 1)),
    ]


@golden
def op_permute(rng):
    return [
        Case("2_0_1", [real(rng, (2, 3, 4))], lambda x: x.permute(2, 0, 1), dims=(2, 0, 1)),
        Case("negative", [real(rng, (2, 3, 4, 2))], lambda x: x.permute(0, -1, 1, 2), dims=(0, -1, 1, 2)),
    ]


@golden
def op_transpose(rng):
    return [
        Case("0_-1", [real(rng, (2, 3, 4))], lambda x: x.transpose(0, -1), dims=(0, -1)),
        Case("1_0", [real(rng, (5, 3))], lambda x: x.transpose(1, 0), dims=(1, 0)),
    ]


@golden
def op_expand(rng):
    return [
        Case("3x1_to_2x3x4", [real(rng, (3, 1))], lambda x: x.expand(2, -1, 4), length=8, sizes=(2, -1, 4)),
        Case("0-d_to_7", [real(rng, ())], lambda x: x.expand(7), length=7, sizes=(7,)),
    ]


@golden
def op_slice(rng):
    return [
        Case("step_2", [real(rng, (4, 7))], lambda x: x[:, 1:-1:2], dim=1, start=1, stop=-1, step=2),
        Case("first_rows", [real(rng, (5, 3))], lambda x: x[0:3], dim=0, start=0, stop=3, step=1),
        Case("last_of_last", [real(rng, (2, 3, 4))], lambda x: x[..., -2:4], dim=-1, start=-2, stop=4, step=1),
    ]


@golden
def op_cat(rng):
    def case(name, shapes, dim, **more):
        return Case(name, [real(rng, s) for s in shapes], lambda *t: torch.cat(t, dim), dim=dim, **more)
    return [
        case("dim_1", ((2, 3), (2, 1), (2, 4)), 1),
        case("dim_0", ((1, 3), (4, 3)), 0),
        case("dim_-2_transposed", ((2, 2, 3), (2, 4, 3)), -2, orders={1: (2, 0, 1)}),
        case("mixed", ((2, 3), (2, 2)), 1, low=[0]),
    ]


@golden
def op_stack(rng):
    def case(name, shape, n, dim, **more):
        return Case(name, [real(rng, shape) for _ in range(n)], lambda *t: torch.stack(t, dim), dim=dim, **more)
    return [case("dim_0", (3, 2), 3, 0), case("dim_-1", (2, 3), 2, -1), case("mixed", (2, 3), 2, 1, low=[1])]


# ---- indexing -----------------------------------------------------------------------------------

@golden
def op_index_select(rng):
    def case(name, shape, dim, n, **more):
        return Case(name, [real(rng, shape), index(rng, (n,), shape[dim])],
                    lambda x, i: torch.index_select(x, dim, i), length=n, dim=dim, **more)
    return [case("dim_0", (6, 4), 0, 9), case("dim_1", (3, 5, 2), 1, 7), case("dim_-1", (3, 5), -1, 2),
            case("transposed", (6, 4), 0, 3, orders={0: (1, 0)})]


@golden
def op_gather(rng):
    def case(name, shape, dim, indices):
        return Case(name, [real(rng, shape), index(rng, indices, shape[dim])],
                    lambda x, i: torch.gather(x, dim, i), length=indices[dim], dim=dim)
    return [case("dim_0", (4, 3), 0, (6, 2)), case("dim_-1", (2, 3, 5), -1, (2, 3, 4))]


@golden
def op_scatter_add(rng):
    def case(name, shape, dim, indices, source, **more):
        return Case(name, [real(rng, shape), index(rng, indices, shape[dim]), real(rng, source)],
                    lambda x, i, s: torch.scatter_add(x, dim, i, s), length=indices[dim] + 1, dim=dim, **more)
    return [case("dim_0", (4, 3), 0, (6, 2), (6, 2)), case("dim_1", (2, 5), 1, (2, 7), (2, 7)),
            case("mixed", (4, 3), 0, (6, 3), (6, 3), low=[2], cuda_only=True)]


@golden
def op_embedding(rng):
    def case(name, shape, indices, padding=-1):
        i = index(rng, indices, shape[0])
        if padding >= 0:
            i.flat[::3] = padding
        return Case(name, [real(rng, shape), i],
                    lambda w, i: F.embedding(i, w, padding_idx=None if padding < 0 else padding),
                    length=math.prod(indices), padding=padding)
    return [case("matrix", (11, 6), (4, 9)), case("vector", (5, 3), (2,)), case("padding", (7, 5), (3, 8), 2),
            case("padding_0", (3, 9), (5, 5), 0)]


# ---- softmax, losses, norms ---------------------------------------------------------------------

def softmax(name, f):
    def cases(rng):
        masked = real(rng, (3, 6), -4, 4)
        masked[0, 1:3] = masked[2, 5] = -INF
        def case(name_, x, dim, **more):
            return Case(name_, [x], lambda t: f(t, dim), length=x.shape[dim] if x.ndim else 1, dim=dim, **more)
        return [
            case("rows", real(rng, (3, 7), -4, 4), -1),
            case("wide", real(rng, (2, 301), -4, 4), -1),
            case("middle", real(rng, (2, 5, 3), -4, 4), 1),
            case("first", real(rng, (5, 4), -4, 4), 0),
            case("one_column", real(rng, (4, 1)), -1),
            case("large", real(rng, (3, 5), 990, 1010), -1),
            case("masked", masked, -1),
            case("transposed", real(rng, (4, 6), -4, 4), -1, orders={0: (1, 0)}),
        ]
    cases.__name__ = "op_" + name
    golden(cases)


softmax("softmax", torch.softmax)
softmax("log_softmax", torch.log_softmax)


@golden
def op_cross_entropy(rng):
    def case(name, shape, reduction="mean", smoothing=0.0, ignore=-100, every=3, **more):
        target = index(rng, shape[:1] + shape[2:], shape[1])
        if ignore != -100:
            target.flat[::every] = ignore
        return Case(name, [real(rng, shape, -3, 3), target],
                    lambda x, t: F.cross_entropy(x, t, ignore_index=ignore, reduction=reduction,
                                                 label_smoothing=smoothing),
                    length=math.prod(shape), reduction=reduction, label_smoothing=smoothing, ignore_index=ignore,
                    **more)
    return [
        case("mean", (9, 11)), case("sum", (9, 11), "sum"), case("none", (9, 11), "none"),
        case("ignored", (9, 11), ignore=2), case("ignored_negative_none", (9, 11), "none", ignore=-1),
        case("ignored_sum", (9, 11), "sum", ignore=4), case("all_ignored_sum", (4, 5), "sum", ignore=-1, every=1),
        case("smoothed", (9, 11), smoothing=0.125), case("smoothed_ignored", (9, 11), "mean", 0.25, 2),
        case("smoothed_ignored_none", (9, 11), "none", 0.25, 2),
        case("images", (2, 5, 3, 2), ignore=1), case("sequence_none", (2, 5, 3), "none"),
        case("wide", (3, 257)), case("transposed", (6, 5), orders={0: (1, 0)}),
    ]


@golden
def op_linear_cross_entropy(rng):
    def case(name, rows, features, classes, reduction="mean", smoothing=0.0, ignore=-100, chunk=0):
        target = index(rng, rows, classes)
        if ignore != -100:
            target.flat[::3] = ignore
        return Case(name, [real(rng, rows + (features,), -1, 1), real(rng, (classes, features), -1, 1), target],
                    lambda x, w, t: F.cross_entropy(F.linear(x, w).reshape(-1, classes), t.reshape(-1),
                                                    ignore_index=ignore, reduction=reduction,
                                                    label_smoothing=smoothing),
                    length=math.prod(rows) * max(features, classes), reduction=reduction, label_smoothing=smoothing,
                    ignore_index=ignore, chunk_rows=chunk)
    return [
        case("mean", (9,), 8, 11), case("sum", (9,), 8, 11, "sum"), case("sequence", (2, 5), 8, 11),
        case("chunks", (9,), 8, 11, chunk=4), case("ignored", (9,), 8, 11, ignore=2, chunk=4),
        case("smoothed", (2, 5), 8, 11, smoothing=0.125, ignore=2),
    ]


@golden
def op_mse_loss(rng):
    def case(name, reduction, shape=(4, 5), **more):
        return Case(name, [real(rng, shape), real(rng, shape)],
                    lambda x, t: F.mse_loss(x, t, reduction=reduction), length=math.prod(shape),
                    reduction=reduction, **more)
    return [case("mean", "mean"), case("sum", "sum"), case("none", "none"), case("mixed", "mean", low=[0]),
            case("transposed", "mean", orders={0: (1, 0)})]


@golden
def op_layer_norm(rng):
    def case(name, shape, normalized, weight=True, bias=True, eps=1e-5, **more):
        arrays = [real(rng, shape)]
        if weight:
            arrays.append(real(rng, normalized, 0.5, 1.5))
        if bias:
            arrays.append(real(rng, normalized))
        return Case(name, arrays, lambda x, w=None, b=None: F.layer_norm(x, normalized, w, b, eps),
                    length=math.prod(shape), low=[0], normalized=normalized, eps=eps, **more)
    return [case("rows", (5, 16), (16,)), case("odd", (7, 33), (33,)), case("wide", (2, 301), (301,)),
            case("three_dimensions", (2, 2, 24), (24,)), case("weight_only", (5, 16), (16,), bias=False),
            case("no_weight", (4, 10), (10,), False, False),
            case("two_dimensions", (3, 4, 5), (4, 5)), case("eps", (5, 16), (16,), eps=0.5),
            case("transposed", (6, 8), (8,), orders={0: (1, 0)})]


@golden
def op_add_layer_norm(rng):
    def case(name, shape, weight=True, bias=True, **more):
        arrays = [real(rng, shape), real(rng, shape)]
        if weight:
            arrays.append(real(rng, shape[-1:], 0.5, 1.5))
        if bias:
            arrays.append(real(rng, shape[-1:]))

        def run(x, residual, w=None, b=None):
            s = x + residual
            return F.layer_norm(s, shape[-1:], w, b, 1e-5), s
        return Case(name, arrays, run, length=math.prod(shape), **{"low": [0, 1], **more})
    return [case("rows", (5, 24)), case("odd", (2, 3, 33)), case("weight_only", (4, 10), bias=False),
            case("no_weight", (4, 10), False, False), case("residual_f32", (5, 24), low=[0])]


@golden
def op_rms_norm(rng):
    def case(name, shape, normalized, weight=True, eps=1e-5, **more):
        arrays = [real(rng, shape)] + ([real(rng, normalized, 0.5, 1.5)] if weight else [])
        return Case(name, arrays, lambda x, w=None: F.rms_norm(x, normalized, w, eps), length=math.prod(shape),
                    low=[0], normalized=normalized, eps=eps, **more)
    return [case("rows", (5, 16), (16,)), case("odd", (7, 33), (33,)), case("wide", (2, 301), (301,)),
            case("no_weight", (4, 10), (10,), False), case("two_dimensions", (3, 4, 5), (4, 5)),
            case("eps", (5, 16), (16,), eps=0.5), case("transposed", (6, 8), (8,), orders={0: (1, 0)})]


@golden
def op_add_rms_norm(rng):
    def case(name, shape, weight=True, **more):
        arrays = [real(rng, shape), real(rng, shape)] + ([real(rng, shape[-1:], 0.5, 1.5)] if weight else [])

        def run(x, residual, w=None):
            s = x + residual
            return F.rms_norm(s, shape[-1:], w, 1e-5), s
        return Case(name, arrays, run, length=math.prod(shape), **{"low": [0, 1], **more})
    return [case("rows", (5, 24)), case("odd", (2, 3, 33)), case("no_weight", (4, 10), False),
            case("residual_f32", (5, 24), low=[0])]


@golden
def op_swiglu(rng):
    def run(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    return [Case("matrix", [real(rng, (3, 10), -3, 3)], run), Case("odd", [real(rng, (2, 3, 34), -3, 3)], run),
            Case("transposed", [real(rng, (6, 8), -3, 3)], run, orders={0: (1, 0)})]


@golden
def op_rotary_embedding(rng):
    def case(name, shape, heads=0, offset=0, positions=None, base=10000.0):
        def run(x, p=None):
            # In float32, as PyTorch's models do, and back to the dtype of x.
            t = torch.arange(shape[1], device=x.device) if p is None else p
            half = shape[3] // 2
            angle = (t + offset).float()[..., None] * base ** (-torch.arange(half, device=x.device) / half)
            cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]  # (T, 1, D/2) or (B, T, 1, D/2)
            n = heads or shape[2]
            a, b = x[:, :, :n].float().chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
            return torch.cat((turned, x[:, :, n:]), 2)
        arrays = [real(rng, shape)] + ([] if positions is None else [np.array(positions, np.int64)])
        return Case(name, arrays, run, heads=heads, offset=offset, base=base)
    return [case("all_heads", (2, 5, 2, 8)), case("some_heads", (1, 4, 3, 6), 2), case("offset", (1, 3, 1, 8), offset=9),
            case("positions", (2, 3, 1, 4), positions=((0, 1, 2), (5, 0, 7))), case("base", (1, 5, 1, 8), base=500.0)]


# ---- attention ----------------------------------------------------------------------------------

@golden
def op_scaled_dot_product_attention(rng):
    def case(name, q, kv, causal=False, mask=None, scale=0.0):
        # B H T D against B G S D; a mask is bool (true: attend) or added to the scores.
        arrays = [real(rng, q), real(rng, kv), real(rng, kv)]
        if mask is not None:
            arrays.append(mask)

        def run(q_, k, v, m=None):
            m = m if m is None or m.dtype == torch.bool else m.detach().to(q_.dtype)
            return F.scaled_dot_product_attention(q_, k, v, m, is_causal=causal, scale=scale or None,
                                                  enable_gqa=q[1] != kv[1])
        return Case(name, arrays, run, length=q[2] * kv[2], low=[0, 1, 2], causal=int(causal), scale=scale)

    some = rng.random((5, 7)) < 0.6
    some[:, 3] = True  # every query attends to a key
    return [
        case("full", (1, 2, 5, 8), (1, 2, 5, 8)),
        case("causal", (1, 2, 9, 8), (1, 2, 9, 8), True),
        case("other_length", (2, 1, 3, 16), (2, 1, 7, 16)),
        case("causal_other_length", (1, 1, 4, 8), (1, 1, 6, 8), True),
        case("odd_head", (1, 1, 5, 7), (1, 1, 5, 7), True),
        case("grouped", (1, 4, 5, 8), (1, 2, 5, 8), True),
        case("scale", (1, 1, 5, 8), (1, 1, 5, 8), scale=0.125),
        case("mask", (1, 2, 5, 8), (1, 2, 7, 8), mask=some),
    ]


@golden
def op_self_attention(rng):
    def case(name, rows, heads, kv_heads, head, causal=True):
        def run(qkv):
            q, k, v = (t.unflatten(-1, (-1, head)).transpose(1, 2)
                       for t in qkv.split([heads * head, kv_heads * head, kv_heads * head], -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
            return y.transpose(1, 2).flatten(2)
        return Case(name, [real(rng, rows + ((heads + 2 * kv_heads) * head,))], run, length=rows[1] * rows[1],
                    heads=heads, kv_heads=kv_heads, causal=int(causal))
    return [case("causal", (2, 5), 2, 2, 8), case("full", (1, 7), 2, 2, 8, False),
            case("grouped", (1, 5), 4, 2, 8), case("one_head", (2, 3), 1, 1, 16)]


# ---- random -------------------------------------------------------------------------------------

@golden
def op_dropout(rng):
    # PyTorch draws other masks than Mixtape. Where `mask` is 1, out0 and grad0 hold what PyTorch
    # gives for an element that is kept, and the replay checks each element to be that or 0 (in the
    # value and the gradient alike), and the number of those kept.
    def case(name, x, p, training, mask):
        return Case(name, [x], lambda t: F.dropout(t, p, training), p=p, training=int(training), mask=int(mask))
    x = grid(rng, (10, 20))
    return [case("p_0", real(rng, (4, 5)), 0.0, True, False), case("p_1", real(rng, (4, 5)), 1.0, True, False),
            case("not_training", real(rng, (4, 5)), 0.5, False, False),
            case("p_0.25", x, 0.25, True, True), case("p_0.5", x, 0.5, True, True)]


# ---- normalisation over channels ---------------------------------------------------------------

@golden
def op_batch_norm(rng):
    def case(name, shape, training=True, tracked=False, residual=False, eps=1e-5, **more):
        c = (shape[1],)

        def run(x, w, b, *rest):
            steps = torch.arange(shape[1], dtype=torch.float32, device=x.device)
            mean, var = (steps / 4, steps / 2 + 1) if tracked else (None, None)  # golden_runs.cpp's too
            y = F.batch_norm(x, mean, var, w, b, training, 0.1, eps)
            return torch.relu(y + rest[-1]) if residual else y

        def draw():
            arrays = [real(rng, shape), real(rng, c, 0.5, 1.5), real(rng, c)]
            return arrays + [real(rng, shape)] if residual else arrays

        def before_relu(x, w, b, r):
            return F.batch_norm(x, None, None, w, b, True) + r
        arrays = away_from_zero(draw, before_relu) if residual else draw()
        low = [0, 3] if residual else [0]
        return Case(name, arrays, run, length=math.prod(shape), low=low, training=int(training),
                    tracked=int(tracked), residual=int(residual), eps=eps, **more)
    return [case("matrix", (8, 5)), case("images", (2, 3, 4, 4)), case("sequences", (3, 4, 5)), case("odd", (3, 17, 1, 2)),
            case("tracked", (2, 3, 4, 4), tracked=True), case("eps", (4, 3, 5), eps=0.5),
            case("evaluation", (2, 3, 4, 4), training=False, tracked=True),
            case("channels_last", (2, 4, 3, 3), orders={0: (0, 2, 3, 1)}),
            case("residual_relu", (1, 2, 3, 3), residual=True)]


@golden
def op_group_norm(rng):
    def case(name, shape, groups, weight=True, bias=True, eps=1e-5, **more):
        arrays = [real(rng, shape)]
        if weight:
            arrays.append(real(rng, shape[1:2], 0.5, 1.5))
        if bias:
            arrays.append(real(rng, shape[1:2]))
        return Case(name, arrays, lambda x, w=None, b=None: F.group_norm(x, groups, w, b, eps),
                    length=math.prod(shape), low=[0], groups=groups, eps=eps, **more)
    return [case("images", (2, 6, 3, 3), 3), case("matrix", (3, 4), 2), case("one_group", (1, 5, 7), 1),
            case("one_channel", (2, 5, 2, 2), 5), case("weight_only", (2, 4, 3), 2, bias=False),
            case("no_weight", (2, 4, 3), 2, False, False), case("eps", (2, 4, 5), 2, eps=0.5),
            case("channels_last", (2, 4, 3, 3), 2, orders={0: (0, 2, 3, 1)})]


# ---- convolution and pooling --------------------------------------------------------------------

@golden
def op_conv2d(rng):
    def case(name, x, w, bias=True, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, act="none",
             orders=None):
        def run(*t):
            b = t[2] if bias else None
            return F.conv2d(t[0], t[1], b, stride, padding, dilation, groups)

        def draw():
            arrays = [real(rng, x, -1, 1), real(rng, w, -1, 1)]
            return arrays + [real(rng, (w[0],))] if bias else arrays
        arrays = away_from_zero(draw, run) if act == "relu" else draw()
        return Case(name, arrays, lambda *t: ACTS[act](run(*t)),
                    length=math.prod(w[1:]) + x[0] * math.prod(x[2:]), orders=orders, stride=stride,
                    padding=padding, dilation=dilation, groups=groups, act=act)
    return [
        case("padded", (2, 3, 5, 5), (4, 3, 3, 3), padding=(1, 1)),
        case("one_by_one", (1, 1, 5, 5), (1, 1, 1, 1), bias=False),
        case("groups_and_stride", (2, 4, 7, 5), (6, 2, 3, 2), stride=(2, 1), padding=(1, 0), groups=2),
        case("dilated_relu", (1, 2, 7, 7), (2, 2, 3, 3), dilation=(2, 2), act="relu"),
        case("relu_no_bias", (1, 3, 4, 4), (2, 3, 3, 3), bias=False, act="relu"),
        case("depthwise", (1, 4, 5, 5), (4, 1, 3, 3), padding=(1, 1), groups=4),
        case("channels_8", (1, 8, 4, 4), (8, 8, 3, 3), padding=(1, 1)),
        case("channels_last", (1, 4, 4, 4), (4, 4, 3, 3), padding=(1, 1), orders={0: (0, 2, 3, 1)}),
        case("stride_3", (1, 2, 8, 8), (3, 2, 2, 2), stride=(3, 3)),
    ]


def pool(name, f, draw):
    def cases(rng):
        def case(name_, x, kernel, stride=None, padding=(0, 0), include=True, orders=None):
            attrs = {"kernel": kernel, "stride": stride or (), "padding": padding, "count_include_pad": int(include)}
            return Case(name_, [x], lambda t: f(t, kernel, stride, padding, include), length=math.prod(kernel),
                        orders=orders, **attrs)
        return [
            case("halves", draw(rng, (2, 2, 6, 6)), (2, 2)),
            case("overlapping", draw(rng, (1, 2, 7, 9)), (3, 3), (2, 2), (1, 1), False),
            case("uneven", draw(rng, (1, 2, 8, 5)), (3, 2), (1, 2), (1, 1)),
            case("ties", whole(rng, (1, 2, 6, 6)), (3, 3), (1, 1)),
            case("channels_last", draw(rng, (2, 3, 4, 4)), (2, 2), orders={0: (0, 2, 3, 1)}),
        ]
    cases.__name__ = "op_" + name
    golden(cases)


pool("max_pool2d", lambda t, k, s, p, i: F.max_pool2d(t, k, s, p), grid)
pool("avg_pool2d", lambda t, k, s, p, i: F.avg_pool2d(t, k, s, p, count_include_pad=i), real)


def adaptive_pool(name, f, draw):
    def cases(rng):
        def case(name_, x, size, orders=None):
            return Case(name_, [x], lambda t: f(t, size), length=math.prod(x.shape[2:]), orders=orders, size=size)
        return [
            case("to_one", draw(rng, (2, 2, 7, 7)), (1, 1)),
            case("uneven", draw(rng, (1, 2, 7, 9)), (3, 4)),
            case("larger", draw(rng, (1, 2, 3, 2)), (5, 3)),
            case("channels_last", draw(rng, (2, 3, 4, 4)), (3, 3), orders={0: (0, 2, 3, 1)}),
        ]
    cases.__name__ = "op_" + name
    golden(cases)


adaptive_pool("adaptive_max_pool2d", F.adaptive_max_pool2d, grid)
adaptive_pool("adaptive_avg_pool2d", F.adaptive_avg_pool2d, real)
