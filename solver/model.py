"""The integer program of a Problem, written as COO lists into MathOpt's ModelProto (its Python expressions are ten times slower).

Variables
    x[c,s]    choice c takes strategy s                                      binary
    e[f,a]    arc a of flow f is used, its price shared by all consumers     in [0, 1]
    g[f,k,a]  arc a carries what consumer k of flow f reads                  in [0, 1]; only where consumers could disagree, see below
    y[v,k]    value v is kept as its policy k says: at a node, in a medium     a policy
    r[o,s]    operator o runs again, under strategy s                        a policy
    z[k]      both operators of pair k run again                             in [0, 1]
    T[t]      seconds of stage t

Constraints
    (one)     sum_s x[c,s] = 1
    (flow)    for every consumer k of a flow and every node n:
                  sum_{arcs into n} g[k] - sum_{arcs out of n} g[k] + supply(n) >= demand_k(n)
              supply(n) = sum of x over suppliers' strategies that make n; in backward also the y[v,k] of node n, the r of operators that remake v at n,
                          and the e of arcs of forward to n that stay
              demand_k(n) = sum of x (or of r, for a rerun's operand) that read n.
    (start)   sum_{arcs out of n} g[k] <= supply(n) + sum of demand_j(n) of consumers j other than k
    (share)   e[f,a] >= g[f,k,a]                       with one consumer g is e itself
    (keep)    sum_k y[v,k] <= 1,  sum of y[v,k] at node n <= sum of x that make or read v at n in forward
    (stay)    e[f,a] <= sum of x that make v where a starts,  and of x that read it where a ends, for arcs that stay
              e[f,a] <= s[f] for them,  e[f,a] <= 1 - s[f] for others that take time
    (rerun)   r[o,s] <= x[c(o),s]
    (pair)    z[k] >= sum_s r[a,s] + sum_s r[b,s] - 1  for pair k = (a, b)
    (time)    T[t] >= sum over what runs of its time on account a of stage t
    (memory)  constant + sum of bytes x variable <= budget at every position
    (limit)   sum of coefficient x variable <= most                for everything else that is bounded
Objective: the sum of T, and a hundred-thousandth of all traffic and all that runs again: where there is time to spare, the plan shall still
not do what it need not. As that is at most resources x T, the bound of T alone is the bound found / (1 + TIE x resources): `Program.true_bound`.

x binary and policies continuous is the bound: a policy is then a share of the layers of a fold. A per-consumer flow is needed: shared arc
variables alone could support themselves in a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2

from autopar.solver.problem import BACKWARD, FORWARD, NONE, Decision, Event, Flow, Key, Member, Problem, Row
from autopar.solver.watch import check

TIE = 1e-5


@dataclass(frozen=True)
class Options:
    """policies: "continuous" | "binary". fixed: strategies already decided. elastic: one variable, in GB, lifts every memory row.
    kept, rerun: policies already decided. every_row: memory rows that hold whatever is decided are written too."""

    policies: str = "continuous"
    fixed: Sequence[int] | None = None
    elastic: bool = False
    kept: Mapping[int, frozenset[int]] | None = None
    rerun: frozenset[int] | None = None
    every_row: bool = False


class Program:
    """`proto` and the meaning of its variables."""

    def __init__(self, problem: Problem, options: Options | None = None) -> None:
        self.problem, self.options = problem, options or Options()
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.cost: list[float] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.coefficients: list[float] = []
        self.variable: dict[Key, int] = {}
        self.row_kind: list[str] = []
        self.over = -1
        self._build()

    # ---- writing -------------------------------------------------------------------------------------------------

    def add(self, lower: float, upper: float, integer: bool = False, cost: float = 0.0) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.cost.append(cost)
        return len(self.lower) - 1

    def constrain(self, kind: str, lower: float, upper: float, terms: Iterable[tuple[int, float]]) -> None:
        row = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.row_kind.append(kind)
        merged: dict[int, float] = {}
        for column, k in terms:
            merged[column] = merged.get(column, 0.0) + k
        for column in sorted(merged):
            if merged[column]:
                self.rows.append(row)
                self.columns.append(column)
                self.coefficients.append(merged[column])

    def event(self, k: int, event: Event) -> None:
        """Its variable, 1 if it happens and else 0 wherever what it follows from is 0 or 1."""
        self.variable["z", k, 0] = z = self.add(0.0, 1.0)

        def terms(members: Iterable[Member], k: float) -> list[tuple[int, float]]:
            return [(v, k) for m in members for v in self.of_member(m)]

        for m in event.every:
            self.constrain("event", 0.0, np.inf, [(z, -1.0), *terms([m], 1.0)])
        for m in event.no:
            self.constrain("event", -np.inf, 1.0, [(z, 1.0), *terms([m], 1.0)])
        if event.one:
            self.constrain("event", 0.0, np.inf, [(z, -1.0), *terms(event.one, 1.0)])
        for needed in [(*event.every, m) for m in event.one] or [event.every]:
            self.constrain("event", 1.0 - len(needed), np.inf, [(z, 1.0), *terms(needed, -1.0), *terms(event.no, 1.0)])

    def of_member(self, member: Member) -> list[int]:
        kind, i = member
        if kind == "z":
            return [self.variable["z", i, 0]]
        return [self.variable["r", i, s] for s in range(len(self.problem.choices[self.problem.reruns[i].choice].labels))]

    def _build(self) -> None:
        p, o = self.problem, self.options
        self.time: dict[int, list[tuple[int, float]]] = defaultdict(list)  # account -> terms
        for c, choice in enumerate(p.choices):
            for s in range(len(choice.labels)):
                fixed = None if o.fixed is None else float(o.fixed[c] == s)
                lo = 0.0 if fixed is None else fixed
                hi = (0.0 if (c, s) in p.forbidden else 1.0) if fixed is None else fixed
                self.variable["x", c, s] = v = self.add(lo, hi, fixed is None)
                self.charge(v, choice.times[s])
            self.constrain("one", 1.0, 1.0, [(self.variable["x", c, s], 1.0) for s in range(len(choice.labels))])
        for i, rerun in enumerate(p.reruns):
            for s in range(len(p.choices[rerun.choice].labels)):
                hi = 1.0 if o.rerun is None or i in o.rerun else 0.0
                self.variable["r", i, s] = v = self.add(0.0, hi, o.policies == "binary")
                self.charge(v, rerun.times[s])
                self.cost[v] = TIE * 1e3 * sum(rerun.times[s].values())
                self.constrain("rerun", -np.inf, 0.0, [(v, 1.0), (self.variable["x", rerun.choice, s], -1.0)])
        for k, event in enumerate(p.events):
            self.event(k, event)
        for i, value in enumerate(p.values):
            for k, policy in enumerate(value.policies):
                allowed = o.kept is None or k in o.kept.get(i, frozenset())
                self.variable["y", i, k] = v = self.add(0.0, 1.0 if allowed else 0.0, o.policies == "binary")
                self.charge(v, policy.times)
                self.cost[v] = TIE * 1e3 * sum(policy.times.values())
            if len(value.policies) > 1:
                self.constrain("keep", -np.inf, 1.0, [(self.variable["y", i, k], 1.0) for k in range(len(value.policies))])
        remade: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # value -> (node, rerun, strategy)
        reread: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for i, rerun in enumerate(p.reruns):
            for v, nodes in rerun.makes:
                remade[v] += [(n, i, s) for s, n in enumerate(nodes) if n != NONE]
            for v, nodes in rerun.reads:
                reread[v].append((i, nodes))
        for v, value in enumerate(p.values):
            check()
            self.flow(v, FORWARD, value.forward, [], [])
            for n in dict.fromkeys(policy.node for policy in value.policies):
                there = [(self.variable["x", e.choice, s], 1.0) for e in (*value.forward.supplies, *value.forward.demands)
                         for s, m in enumerate(e.nodes) if m == n]  # fmt: skip
                here = [(self.variable["y", v, k], -1.0) for k, policy in enumerate(value.policies) if policy.node == n]
                self.constrain("keep", 0.0, np.inf, [*here, *there])
            if value.backward is not None:
                extra = [(policy.node, self.variable["y", v, k]) for k, policy in enumerate(value.policies)]
                extra += [(n, self.variable["r", i, s]) for n, i, s in remade[v]]
                extra += [(arc.dst, self.variable["e", v, FORWARD, a]) for a, arc in enumerate(value.forward.arcs) if arc.stays]
                self.flow(v, BACKWARD, value.backward, extra, reread[v])
        self.stages = [self.add(0.0, np.inf, False, 1.0) for _ in p.stages]
        for a, account in enumerate(p.accounts):
            if self.time[a]:
                self.constrain("time", 0.0, np.inf, [(self.stages[account.stage], 1.0), *((v, -k) for v, k in self.time[a])])
        if o.elastic:
            self.over = self.add(0.0, np.inf, False, 0.0)
        rows = p.rows if o.elastic or o.every_row else _that_may_bind(p)
        needed = {key[1] for row in rows for key, _ in row.terms if key[0] == "s"}
        for i in reversed(range(len(p.rests))):
            if i in needed:
                needed |= {key[1] for key, _ in p.rests[i] if key[0] == "s"}
        for i in sorted(needed):  # gigabytes
            self.variable["s", i, 0] = rest = self.add(0.0, np.inf)
            parts = [(self.variable[of], -k if of[0] == "s" else -k / 1e9) for of, k in p.rests[i]]
            self.constrain("rest", 0.0, np.inf, [(rest, 1.0), *parts])
        for row in rows:
            terms = [(self.variable[key], k if key[0] == "s" else k / 1e9) for key, k in row.terms]
            if o.elastic:
                terms.append((self.over, -1.0))
            self.constrain("memory", -np.inf, (p.budget_bytes - row.constant) / 1e9, terms)
        for limit in p.limits:
            self.constrain("limit", -np.inf, limit.most / limit.unit, [(self.variable[key], k / limit.unit) for key, k in limit.terms])

    def charge(self, variable: int, times: Mapping[int, float]) -> None:
        for a, t in times.items():
            self.time[a].append((variable, t * 1e3))

    def flow(
        self,
        v: int,
        direction: int,
        flow: Flow,
        extra: list[tuple[int, int]],
        reread: list[tuple[int, tuple[int, ...]]],
    ) -> None:
        supply: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for end in flow.supplies:
            for s, n in enumerate(end.nodes):
                if n != NONE:
                    supply[n].append((self.variable["x", end.choice, s], 1.0))
        for n, variable in extra:
            supply[n].append((variable, 1.0))
        demands: list[dict[int, list[tuple[int, float]]]] = []
        for end in flow.demands:
            d: dict[int, list[tuple[int, float]]] = defaultdict(list)
            for s, n in enumerate(end.nodes):
                if n != NONE:
                    d[n].append((self.variable["x", end.choice, s], 1.0))
            if d:
                demands.append(d)
        demands += self.rereads(flow, reread)
        used = [self.add(0.0, 1.0, self.options.policies == "binary") for _ in flow.arcs]
        for a, arc in enumerate(flow.arcs):
            self.variable["e", v, direction, a] = used[a]
            self.charge(used[a], arc.times)
            self.cost[used[a]] = TIE * 1e3 * sum(t for i, t in arc.times.items() if self.problem.accounts[i].resource != "compute")
        self.stay(flow, used, supply, demands)
        into: dict[int, list[int]] = defaultdict(list)
        out: dict[int, list[int]] = defaultdict(list)
        for a, arc in enumerate(flow.arcs):
            into[arc.dst].append(a)
            out[arc.src].append(a)
        touched = sorted(set(into) | set(out) | {n for d in demands for n in d})
        for d in demands:
            carried = used if len(demands) == 1 else [self.add(0.0, 1.0) for _ in flow.arcs]
            if carried is not used:
                for a in range(len(flow.arcs)):
                    self.constrain("share", 0.0, np.inf, [(used[a], 1.0), (carried[a], -1.0)])
            for n in touched:
                terms = [(carried[a], 1.0) for a in into[n]] + [(carried[a], -1.0) for a in out[n]]
                terms += supply[n] + [(x, -k) for x, k in d.get(n, ())]
                if terms:
                    self.constrain("flow", 0.0, np.inf, terms)
                if into[n] and out[n]:  # else the row above says it
                    others = [term for other in demands if other is not d for term in other.get(n, ())]
                    self.constrain("start", 0.0, np.inf, [*((carried[a], -1.0) for a in out[n]), *supply[n], *others])

    def stay(
        self, flow: Flow, used: list[int], supply: Mapping[int, list[tuple[int, float]]], demands: list[dict[int, list[tuple[int, float]]]]
    ) -> None:
        """used: variables of arcs."""
        if not any(arc.stays for arc in flow.arcs):
            return
        stays = self.add(0.0, 1.0)
        for a, arc in enumerate(flow.arcs):
            if not arc.stays:
                if arc.times:
                    self.constrain("stay", -np.inf, 1.0, [(used[a], 1.0), (stays, 1.0)])
                continue
            self.constrain("stay", 0.0, np.inf, [(used[a], -1.0), (stays, 1.0)])
            for there in (supply.get(arc.src, []), [term for d in demands for term in d.get(arc.dst, ())]):
                self.constrain("stay", 0.0, np.inf, [(used[a], -1.0), *there])

    def rereads(self, flow: Flow, reread: list[tuple[int, tuple[int, ...]]]) -> list[dict[int, list[tuple[int, float]]]]:
        """What reruns read. Those of one choice that read at the same nodes are one consumer, that of all of them which runs; where the choice
        reads there in backward anyway (and r <= x) they need nothing of their own."""
        p = self.problem
        present = {(end.choice, end.nodes) for end in flow.demands}
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for i, nodes in reread:
            groups[p.reruns[i].choice, nodes].append(i)
        out = []
        for (choice, nodes), members in groups.items():
            if (choice, nodes) in present or all(n == NONE for n in nodes):
                continue
            d: dict[int, list[tuple[int, float]]] = defaultdict(list)
            for s, n in enumerate(nodes):
                if n == NONE:
                    continue
                runs = self.variable["r", members[0], s]
                if len(members) > 1:
                    runs = self.add(0.0, 1.0)
                    for i in members:
                        self.constrain("rerun", 0.0, np.inf, [(runs, 1.0), (self.variable["r", i, s], -1.0)])
                d[n].append((runs, 1.0))
            out.append(d)
        return out

    def true_bound(self, bound: float) -> float:
        """The bound of the sum of T, from the solver's bound of the objective."""
        return bound / (1 + TIE * len({a.resource for a in self.problem.accounts}))

    # ---- reading -------------------------------------------------------------------------------------------------

    def proto(self, objective: str = "time") -> model_pb2.ModelProto:
        m = model_pb2.ModelProto()
        n = len(self.lower)
        m.variables.ids.extend(range(n))
        m.variables.lower_bounds.extend(self.lower)
        m.variables.upper_bounds.extend(self.upper)
        m.variables.integers.extend(self.integer)
        m.linear_constraints.ids.extend(range(len(self.row_lower)))
        m.linear_constraints.lower_bounds.extend(self.row_lower)
        m.linear_constraints.upper_bounds.extend(self.row_upper)
        m.linear_constraint_matrix.row_ids.extend(self.rows)
        m.linear_constraint_matrix.column_ids.extend(self.columns)
        m.linear_constraint_matrix.coefficients.extend(self.coefficients)
        costs = [(self.over, 1.0)] if objective == "over" else [(i, c) for i, c in enumerate(self.cost) if c]
        m.objective.linear_coefficients.ids.extend(i for i, _ in costs)
        m.objective.linear_coefficients.values.extend(c for _, c in costs)
        return m

    def decision(self, values: Sequence[float]) -> tuple[Decision, bool]:
        """The answer in `values`, and whether its policies are whole (not shares of layers)."""
        p, whole = self.problem, True

        def on(key: Key) -> bool:
            nonlocal whole
            i = self.variable.get(key)
            if i is None:
                return False
            whole &= min(values[i], 1 - values[i]) < 1e-5
            return values[i] > 0.5

        x = tuple(
            max(range(len(c.labels)), key=[values[self.variable["x", i, s]] for s in range(len(c.labels))].__getitem__)
            for i, c in enumerate(p.choices)
        )
        kept = {
            v: frozenset(k for k in range(len(value.policies)) if on(("y", v, k))) for v, value in enumerate(p.values) if value.policies
        }
        rerun = frozenset(i for i, r in enumerate(p.reruns) if on(("r", i, x[r.choice])))
        arcs = {}
        for v, value in enumerate(p.values):
            for direction, flow in ((FORWARD, value.forward), (BACKWARD, value.backward)):
                if flow is not None:
                    mine = {a for a in range(len(flow.arcs)) if on(("e", v, direction, a))}
                    arcs[v, direction] = frozenset(mine)
        return Decision(x, {v: k for v, k in kept.items() if k}, rerun, {k: a for k, a in arcs.items() if a}), whole


def _that_may_bind(p: Problem) -> list[Row]:
    """Memory rows that some decision exceeds. Of a choice's strategies, of a value's policies and of a rerun's strategies at most one counts."""
    most_of: list[float] = []

    def most(terms: Iterable[tuple[Key, float]]) -> float:
        one: dict[tuple[str, int], float] = {}
        total = 0.0
        for key, k in terms:
            if k <= 0:
                continue
            if key[0] == "s":
                total += k * most_of[key[1]]
            elif key[0] in ("x", "y", "r"):
                one[key[0], key[1]] = max(one.get((key[0], key[1]), 0.0), k)
            else:
                total += k
        return total + sum(one.values())

    for rest in p.rests:
        most_of.append(most(rest))
    return [row for row in p.rows if row.constant + most(row.terms) > p.budget_bytes]
