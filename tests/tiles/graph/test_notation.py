"""Fusion trees as text: what each tree computes, in what order, and what that moves between levels."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph import notation
from onewave.tiles.graph.builders import gemm
from onewave.tiles.graph.notation import parse_notation
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.simulate import simulate
from onewave.tiles.sim.traffic import compulsory

HEAD = """
dim M=64 N=64 D=16          # sizes
dtype bf16
tensor S fp32
op qk   S[M,N] += Q[M,D] * K[N,D]
op soft P[M,N]  = S[M,N]
op pv   O[M,D] += P[M,N] * V[N,D]
level smem 8KiB private
level L2 1MB belady
"""
FUSED = "tree for M:16 { for N:16 { qk soft pv } }"
STAGED = """tree for M:16 { for N:16 { qk } }
     for M:16 { for N:16 { soft } }
     for M:16 { for N:16 { pv } }"""


def names(graph):
    return [task.name for task in graph.tasks]


def test_a_tree_is_walked_from_the_outside_in():
    graph = parse_notation(HEAD + FUSED).graph
    assert names(graph) == ["qk", "soft", "pv"] * 16
    assert graph.tasks[3].reads == (("Q", (0, 0)), ("K", (1, 0)))
    assert graph.tasks[4].writes == (("P", (0, 1)),)
    assert graph.tasks[3].index == (0, 1, 0)
    assert names(parse_notation(HEAD + STAGED).graph) == ["qk"] * 16 + ["soft"] * 16 + ["pv"] * 16


def test_a_sum_is_read_back_after_its_first_step():
    graph = parse_notation(HEAD + FUSED).graph
    sums = [bool({*task.reads} & {*task.writes}) for task in graph.tasks if task.name == "pv"]
    assert sums == [False, True, True, True] * 4
    assert not any({*task.reads} & {*task.writes} for task in graph.tasks if task.name == "qk")


def test_the_tree_says_what_one_operator_says_as_a_gemm():
    text = "dim M=64 N=48 K=32\nop mul C[M,N] += A[M,K] * B[K,N]\ntree for M:16 { for N:16 { mul } }"
    graph, expected = parse_notation(text).graph, gemm(64, 48, 32, (16, 16, 32))
    assert [task.reads for task in graph.tasks] == [task.reads for task in expected.tasks]
    assert [task.flops for task in graph.tasks] == [task.flops for task in expected.tasks]
    assert [task.index[:2] for task in graph.tasks] == [task.index for task in expected.tasks]


def test_flops_do_not_depend_on_the_tree():
    def flops(tree):
        return sum(task.flops for task in parse_notation(HEAD + tree).graph.tasks)

    assert flops(FUSED) == flops(STAGED) == flops("tree qk soft pv") == 2 * 64 * 64 * 16 * 2 + 64 * 64


def test_fusion_keeps_intermediates_in_the_inner_level():
    moved = {}
    for name, tree in (("fused", FUSED), ("staged", STAGED)):
        read = parse_notation(HEAD + tree)
        report = simulate(read.graph, "sequential", Machine(1, levels=read.levels), mode="serial").report
        assert [(level.level, level.capacity, level.policy) for level in report.levels] == [
            ("smem", 8192, "lru"),
            ("L2", 10**6, "belady"),
        ]
        moved[name] = {tensor.tensor: tensor.loaded_bytes for tensor in report.levels[0].tensors}
    assert moved["fused"]["S"] == moved["fused"]["P"] == 0
    assert moved["staged"]["P"] == 2 * 64 * 64
    assert sum(moved["fused"].values()) < sum(moved["staged"].values())


def test_an_operator_is_computed_again_in_a_loop_over_a_dimension_that_it_lacks():
    text = (
        "dim M=32 N=32 L=32\nop a T[M,N] = X[M,N]\nop b Y[M,L] += T[M,N] * W[N,L]\ntree for L:16 { for M:16 { a b } }"
    )
    graph = parse_notation(text).graph
    assert names(graph) == ["a", "b"] * 4
    assert not any({*task.reads} & {*task.writes} for task in graph.tasks)


def test_nested_loops_over_one_dimension_cut_it_twice():
    graph = parse_notation("dim M=40\nop copy Y[M] = X[M]\ntree for M:16 { for M:8 { copy } }").graph
    assert [task.writes for task in graph.tasks] == [(("Y", (i,)),) for i in range(5)]
    assert compulsory(graph) == (80, 80)


def test_a_larger_step_reads_all_the_smaller_tiles_inside_it():
    text = "dim M=64\nop a T[M] = X[M]\nop b Y[M] = T[M]\ntree for M:16 { a } for M:32 { b }"
    graph = parse_notation(text).graph
    assert graph.tasks[4].reads == (("T", (0,)), ("T", (1,)))


def test_a_sum_stays_right_where_the_same_loops_stand_the_other_way_round_or_take_one_step():
    head = "dim M=4 X=4 K=8\nop a C[M] += A[M,K]\nop b D[M,X] = C[M]\n"
    for tree in ("for X:1 { for K:4 { a } }", "for K:4 { for X:4 { a } }", "for K:8 { for X:1 { a } }", "a a"):
        assert set(names(parse_notation(f"{head}tree {tree} for X:1 {{ b }}").graph)) == {"a", "b"}


def test_a_byte_order_mark_and_tabs_are_no_words():
    text = "\ufeffdim\tM=32\nop\ta T[M] = X[M]\ntree\tfor M:16 {\ta }"
    assert names(parse_notation(text).graph) == ["a", "a"]


def test_par_accepts_only_what_is_independent():
    text = "dim M=32\nop a T[M] = X[M]\nop b U[M] = X[M]\nop c Y[M] = T[M]\n"
    assert names(parse_notation(text + "tree for M:16 { par { a b } c }").graph) == ["a", "b", "c"] * 2
    with pytest.raises(InvalidArgumentError, match=r"line 5: par: .*do not depend on each other"):
        parse_notation(text + "tree for M:16 { par { a c } b }")


class Compared(np.ndarray):
    """Numbers that count how many of them are compared."""

    count = 0

    def __array_ufunc__(self, ufunc, method, *given, **more):
        Compared.count += self.size
        return getattr(ufunc, method)(*(np.asarray(each) for each in given), **more)


def test_a_par_in_a_loop_of_many_steps_is_checked_without_a_pass_over_all_edges_at_each(monkeypatch):
    real, steps = notation._check_parallel, 1000

    def check(graph, groups):
        ends = {end: getattr(graph.edges, end).view(Compared) for end in ("producer", "consumer")}
        assert len(ends["producer"]) == 2 * steps
        real(SimpleNamespace(edges=SimpleNamespace(**ends)), groups)

    monkeypatch.setattr(notation, "_check_parallel", check)
    monkeypatch.setattr(Compared, "count", 0)
    head = f"dim M={steps}\nop a R[M] = X[M]\nop b S[M] = R[M]\nop c T[M] = R[M]\n"
    parse_notation(f"{head}tree for M:1 {{ a par {{ b c }} }}")
    assert 0 < Compared.count <= 4 * steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no tree"),
        (HEAD, "no tree"),
        ("loop M", "line 1: loop"),
        ("dim M", "line 1: M; allowed: NAME=SIZE"),
        ("dim M=0", "M=0"),
        ("dtype fp2", "fp32, bf16"),
        ("level L2", "level NAME SIZE"),
        ("level L2 fast", "line 1: fast"),
        ("\nlevel L2 50XB", "line 2: 50XB; allowed: 1 byte or more"),
        ("level L2 0MB", "line 1: 0MB"),
        ("level L2 1MB lru fifo", "one policy"),
        ("level L2 1MB clock", "line 1: clock; allowed: lru, fifo, belady"),
        ("level L2 1MB\nlevel L2 2MB", "line 2: L2; allowed: a new name"),
        ("level memory 1MB", "line 1: memory; allowed: a new name"),
        ("op mul", "RESULT"),
        ("dim M=1\nop a Y[M] = X[M]\nop a Z[M] = X[M]\ntree a", "line 3: a; allowed: a new name"),
        ("op a Y[M] = X[M]", "dimension M"),
        ("dim M=1 N=1\nop a Y[M] = X[M]\nop b Z[N] = X[N]", "everywhere"),
        ("dim M=1\nop a Y[M] = Y[M]", "to add to the result"),
        (HEAD + "tree qk soft", "line 10: tree: without pv"),
        (HEAD + "tree qk soft pv }", "a { for every }"),
        (HEAD + "tree for M:16 { qk soft pv", "the end"),
        (HEAD + "tree for Z:16 { qk soft pv }", "for Z:16"),
        (HEAD + "tree for M:0 { qk soft pv }", "for M:0"),
        (HEAD + "tree for M:65 { qk soft pv }", "line 10: for M: 65; allowed: up to 64"),
        (HEAD + "tree for M:16 { \n for M:32 { qk soft pv } }", "line 11: for M: 32; allowed: up to 16"),
        (HEAD + "tree for M:16 { qk }\nfor M:24 { soft pv }", "line 11: tiles of M: 16, 24; allowed: each a multiple"),
        (HEAD + "tree qk soft pw", "operators: qk, soft, pv"),
        (HEAD + "tree qk; soft pv", "line 10: ;"),
        (HEAD + "tensor Z fp32\ntree qk soft pv", "line 10: tensor Z; allowed: S, Q, K, P, O, V"),
        ("dim M=999999999 N=999999999\nop a Y[M,N] = X[M,N]\ntree for M:1 { for N:1 { a } }", "larger tiles"),
        (HEAD + "tree " + "for M:64 {" * 40 + "qk soft pv" + "}" * 40, "up to 32"),
        ("#" * 100_001, "characters"),
        ("dim M=999999999999\nop a B[M] = A[M]\ntree a for M:1 { }", "line 3: { }; allowed: an operator inside"),
        ("dim M=9\nop a B[M] = A[M]\ntree a for M:1 { par { } }", "an operator inside"),
        ("dim M=9\ntree", "line 2: the end"),
        (
            "dim M=1000000 N=10000\nop a B[M] = A[M]\nop b D[N] += B[M] * C[N]\ntree for M:1 { a } for N:1 { b }",
            "tile accesses: 10,002,020,000",
        ),
        ("dim M=9\ndim M=8\nop a B[M] = A[M]\ntree a", "line 2: M again"),
        ("dim M=9\nop a B[M] = A[M]\nop b B[M] = C[M]\ntree a b", "line 3: B again; allowed: one operator"),
        (
            "dim M=9\nop a B[M] = A[M]\nop b C[M] = B[M]\ntree for M:3 {\nb a }",
            "line 5: tree: b reads tile B[0] before a has made",
        ),
        ("dim M=9\nop a B[M] = A[M]\nop b C[M] = B[M]\ntree for M:3 { a } for M:9 { b }  c", "line 4: c"),
        ("dim M=9\nop a B[M] = A[M]\n\ntree for M:3 {\n a\n\n xyz }", "line 7: xyz"),
        ("dim M=9\nop a B[M] = A[M]\ntree for M:3 {\n a\n", "line 4: the end"),
        (
            "dim M=4 X=4 K=8\nop a C[M] += A[M,K]\nop b D[M,X] = C[M]\ntree for K:4 { for X:1 { a } } for X:1 { b }",
            "line 4: for X: inside for K, over which a sums",
        ),
        ("dim M=4 K=8\nop a C[M] = A[M,K]\ntree for K:4 { a }", "line 3: for K: around a, whose result lacks K"),
        (
            "dim M=4 N=4 K=8\nop a C[M] += A[M,K]\nop b D[N] += C[M]\nop c E[N,K] = D[N]\ntree for K:4 { a b c }",
            "line 5: for K: around c, which reads D before its sum over K has ended",
        ),
        (
            "dim M=2 K=2\nop a R[M] += X[M,K]\nop b S[M] = R[M]\ntree a\nfor K:1 { b a }",
            "line 5: for K: around b, which reads R before its sum over K has ended; allowed: b after that loop",
        ),
        (
            "dim M=2 K=2\nop a R[M] += X[M,K]\nop b S[M] = R[M]\nop c T[M] = S[M]\ntree a b for K:1 { c a b }",
            "line 5: for K: around c, which reads S before its sum over K has ended",
        ),
        ("dim M=4 K=8\nop a C[M] += A[M,K]\ntree for K:4 { a a }", "line 3: tree: a twice in the loop over K"),
    ],
)
def test_what_is_no_tree_is_refused_with_its_line(text, words):
    with refused(InvalidArgumentError, words):
        parse_notation(text)


def random_tree(rng: random.Random):
    """Sizes, operators as (name, result, inputs, sums), every tensor's dimensions, and a tree of names and loops."""
    sizes = {dim: rng.choice([2, 4]) for dim in "ABC"}
    dims: dict[str, tuple[str, ...]] = {}
    operators = []
    for number in range(rng.randint(1, 3)):
        known = [f"R{earlier}" for earlier in range(number)]
        inputs = [
            rng.choice(known) if known and rng.random() < 0.7 else f"I{number}{k}" for k in range(rng.randint(1, 2))
        ]
        for name in (*inputs, f"R{number}"):
            dims.setdefault(name, tuple(rng.sample("ABC", rng.randint(1, 2))))
        operators.append((f"o{number}", f"R{number}", list(dict.fromkeys(inputs)), rng.random() < 0.6))

    def grown(names, room, depth):
        nodes = []
        while names:
            count = rng.randint(1, len(names))
            part, names = names[:count], names[count:]
            dim = rng.choice("ABC")
            tile = rng.choice([size for size in (1, 2, 4) if size <= room[dim]])
            loop = depth < 4 and rng.random() < 0.7
            nodes += [(dim, tile, grown(part, room | {dim: tile}, depth + 1))] if loop else part
        return nodes

    names = [name for name, *_ in operators]
    for _ in range(rng.randint(0, 2)):
        names.insert(rng.randint(0, len(names)), rng.choice(names))
    return sizes, operators, dims, grown(names, sizes, 0)


def test_an_accepted_tree_computes_what_its_operators_say():
    rng, accepted = random.Random(0), 0
    for _ in range(1500):
        sizes, operators, dims, tree = random_tree(rng)

        def shown(node):
            return node if isinstance(node, str) else f"for {node[0]}:{node[1]} {{ {' '.join(map(shown, node[2]))} }}"

        def operand(name, dims=dims):
            return f"{name}[{','.join(dims[name])}]"

        lines = [f"dim {dim}={size}" for dim, size in sizes.items()]
        for name, out, inputs, sums in operators:
            lines.append(f"op {name} {operand(out)} {'+=' if sums else '='} {' * '.join(map(operand, inputs))}")
        text = "\n".join((*lines, f"tree {' '.join(map(shown, tree))}"))
        try:
            parse_notation(text)
        except InvalidArgumentError:
            continue
        accepted += 1
        filled = {name: rng.choices(range(1, 1000), k=64) for name in dims}
        given = {name: np.array(values).reshape(4, 4, 4) for name, values in filled.items()}
        whole = {dim: (0, size) for dim, size in sizes.items()}
        found, expected = ({name: array.copy() for name, array in given.items()} for _ in range(2))
        for operator in operators:
            compute(operator, dims, expected, whole)
        walk(tree, operators, dims, found, whole)
        assert all((found[out] == expected[out]).all() for _, out, *_ in operators), text
    assert accepted > 700


def compute(operator, dims, store, part):
    """One operator on a part, on arrays [A, B, C] that are constant along the dimensions that a tensor lacks."""
    _, out, inputs, sums = operator
    where = tuple(slice(*part[dim]) for dim in "ABC")
    lacking = {dim for name in inputs for dim in dims[name]} - set(dims[out])
    product = np.ones(1, dtype=np.int64)
    for name in inputs:
        constant = store[name][tuple(slice(None) if dim in dims[name] else slice(0, 1) for dim in "ABC")]
        product = (
            product * constant[tuple(w if d in dims[name] else slice(None) for w, d in zip(where, "ABC", strict=True))]
        )
    total = product.sum(axis=tuple("ABC".index(dim) for dim in lacking), keepdims=True) % 999_983
    target = store[out][tuple(w if d in dims[out] else slice(0, 1) for w, d in zip(where, "ABC", strict=True))]
    again = sums and any(part[dim][0] > 0 for dim in lacking)
    target[...] = (total + target * again) % 999_983


def walk(nodes, operators, dims, store, part):
    for node in nodes:
        if isinstance(node, str):
            compute(next(operator for operator in operators if operator[0] == node), dims, store, part)
            continue
        dim, tile, children = node
        for start in range(*part[dim], tile):
            walk(children, operators, dims, store, part | {dim: (start, min(start + tile, part[dim][1]))})
