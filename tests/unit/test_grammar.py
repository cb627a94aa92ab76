"""The rule language: letters and their sizes, marks, composite dims, optional operands, and what a strategy makes of a line."""

from __future__ import annotations

import pytest

from autopar.graph.graph import Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.rules import fallback
from autopar.rules.grammar import Line, Rule, RuleError, match
from autopar.rules.strategy import is_legal, letter_at, placements, single_axis

Shape = tuple[int, ...]


def op(inputs: list[Shape], outputs: list[Shape | None]) -> Op:
    ins = tuple(Tensor(f"i{i}", s, "float32") for i, s in enumerate(inputs))
    outs = tuple(None if s is None else Tensor(f"o{i}", s, "float32") for i, s in enumerate(outputs))
    return Op("op", "aten.test.default", ins, {}, outs)


def rule(line: Line | str, inputs: list[Shape], outputs: list[Shape | None]) -> Rule:
    return match(line, op(inputs, outputs))


def splittable(r: Rule) -> set[str]:
    return {x for x, f in r.factors.items() if f.split}


def test_letters_take_their_sizes_from_the_shapes() -> None:
    r = rule("m k+, k+ n -> m n", [(4, 6), (6, 8)], [(4, 8)])
    assert {x: f.size for x, f in r.factors.items()} == {"m": 4, "k": 6, "n": 8}
    assert r.factors["k"].reduce == "sum"
    assert splittable(r) == {"m", "k", "n"}
    assert r.inputs == ((("m",), ("k",)), (("k",), ("n",)))


def test_a_letter_missing_from_an_output_may_not_be_split_without_a_mark() -> None:
    assert splittable(rule("a b -> a", [(4, 6)], [(4,)])) == {"a"}
    assert splittable(rule("a b -> a b, a", [(4, 6)], [(4, 6), (4,)])) == {"a"}
    assert splittable(rule("a b+ -> a b, a", [(4, 6)], [(4, 6), (4,)])) == {"a", "b"}


@pytest.mark.parametrize(("mark", "reduce"), [("+", "sum"), (":max", "max"), (":min", "min")])
def test_reductions(mark: str, reduce: str) -> None:
    assert rule(f"a b{mark} -> a", [(4, 6)], [(4,)]).factors["b"].reduce == reduce


def test_marks_count_wherever_they_stand() -> None:
    r = rule("a! b^, a b -> a b", [(4, 6), (4, 6)], [(4, 6)])
    assert splittable(r) == {"b"}
    assert r.factors["b"].index and not r.factors["a"].index


def test_composite_dims_are_solved_from_other_operands_or_given_sizes() -> None:
    assert rule("b (h d) -> b h d", [(2, 12)], [(2, 3, 4)]).factors["d"].size == 4
    r = rule(Line("(p! g) -> (q! g)", sizes={"g": 4}), [(12,)], [(8,)])
    assert (r.factors["p"].size, r.factors["q"].size) == (3, 2)
    assert splittable(r) == {"g"}
    with pytest.raises(RuleError, match="cannot find the sizes"):
        rule("(a b) -> (a b)", [(12,)], [(12,)])


def test_sizes_must_agree() -> None:
    with pytest.raises(RuleError, match="sizes do not agree"):
        rule("a, a -> a", [(4,), (6,)], [(4,)])
    with pytest.raises(RuleError, match="sizes do not agree"):
        rule(Line("(a b) -> a", sizes={"b": 5}), [(12,)], [(3,)])


def test_dots_are_aligned_to_the_right() -> None:
    r = rule("... h!, h! -> ... h, ... 1", [(2, 3, 8), (8,)], [(2, 3, 8), (2, 3, 1)])
    assert r.inputs[0] == (("_2",), ("_1",), ("h",))
    assert r.outputs[1] == (("_2",), ("_1",), ())
    assert splittable(r) == {"_1", "_2"}
    unequal = rule("... a, ... a -> ... a", [(3, 8), (2, 3, 8)], [(2, 3, 8)])
    assert unequal.inputs == ((("_1",), ("a",)), (("_2",), ("_1",), ("a",)))


def test_optional_operands() -> None:
    line = "... k+, n k+, n? -> ... n"
    assert len(rule(line, [(2, 4), (3, 4), (3,)], [(2, 3)]).inputs) == 3
    assert len(rule(line, [(2, 4), (3, 4)], [(2, 3)]).inputs) == 2
    # An operand with no dims, alone.
    assert rule("? -> a", [()], [(4,)]).inputs == ((),)


def test_outputs_that_are_no_tensors() -> None:
    assert rule("a -> a, -", [(4,)], [(4,), None]).outputs == ((("a",),), None)
    with pytest.raises(RuleError, match="'-' for a tensor"):
        rule("a -> -", [(4,)], [(4,)])
    with pytest.raises(RuleError, match="no tensor"):
        rule("a -> a", [(4,)], [None])


@pytest.mark.parametrize("line", ["a -> a b", "a b -> a", "a, a -> a", "a -> a, a", "a@ -> a"])
def test_a_line_that_does_not_fit_names_its_op(line: str) -> None:
    with pytest.raises(RuleError, match=r"aten\.test\.default"):
        rule(line, [(4,)], [(4,)])


def test_linear_sets_that_name_a_missing_operand_are_left_out() -> None:
    assert rule(Line("a, a? -> a", "0&1|0"), [(4,)], [(4,)]).linear == (frozenset({0}),)
    assert rule(Line("a, a? -> a", "0&1"), [(4,), (4,)], [(4,)]).linear == (frozenset({0, 1}),)


def test_a_fallback_splits_nothing() -> None:
    r = fallback(op([(4, 6)], [(4,), None]))
    assert r.is_fallback and splittable(r) == set()
    assert [len(d) for d in r.inputs] == [2] and r.outputs[1] is None


# --- strategies -------------------------------------------------------------------------------------------------

MESH = Mesh.of({"a": 2, "b": 2})


def test_placements_follow_the_letters() -> None:
    r = rule("b (h d), h! -> b h d, b", [(4, 12), (3,)], [(4, 3, 4), (4,)])
    ins, outs = placements(r, {"a": ("b", 2), "b": ("d", 2)}, ((4, 12), (3,)), ((4, 3, 4), (4,)))
    assert ins == (Placement.of((4, 12), {"a": (0, 2), "b": (1, 2)}), Placement.of((3,)))
    assert outs[0] == Placement.of((4, 3, 4), {"a": (0, 2), "b": (2, 2)})


def test_an_output_without_the_letter_is_partial() -> None:
    r = rule(Line("m k+, k+ n -> m n", "0|1"), [(4, 6), (6, 8)], [(4, 8)])
    ins, outs = placements(r, {"a": ("k", 3)}, ((4, 6), (6, 8)), ((4, 8),), {"b": frozenset({0})})
    assert ins[0] == Placement.of((4, 6), {"a": (1, 3)}, {"b": "sum"})
    assert ins[1] == Placement.of((6, 8), {"a": (0, 3)})
    assert outs == (Placement.of((4, 8), None, {"a": "sum", "b": "sum"}),)


def test_two_axes_on_one_letter_own_different_digits() -> None:
    r = rule("x y! -> x y", [(8, 4)], [(8, 4)])
    assert is_legal(r, {"a": ("x", 4), "b": ("x", 2)}, MESH)
    assert is_legal(r, {"a": ("x", 1), "b": ("x", 4)}, MESH)
    assert not is_legal(r, {"a": ("x", 4), "b": ("x", 4)}, MESH)
    assert not is_legal(r, {"a": ("x", 8)}, MESH)
    assert not is_legal(r, {"a": ("y", 2)}, MESH)


def test_single_axis_lists_the_letters_that_divide() -> None:
    r = rule("x y z! -> x y z", [(8, 3, 4)], [(8, 3, 4)])
    assert list(single_axis(r, "a", MESH)) == [("x", 4)]


def test_letter_at_finds_the_owner_of_a_digit() -> None:
    r = rule("(h d) -> h d", [(12,)], [(3, 4)])
    dims = r.inputs[0]
    assert letter_at(dims, (0, 2), 2, r) == ("d", 2)
    assert letter_at(dims, (0, 4), 3, r) == ("h", 1)
    assert letter_at(dims, (0, 2), 3, r) is None
