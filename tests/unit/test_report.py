"""The page of a plan: it parses, says the plan's numbers, refers to nothing outside of itself, and renders in a browser without an error, in light and in dark."""

from __future__ import annotations

import dataclasses
import html.parser
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli import report as cli_report
from autopar.cli.main import app
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.plan.text import middle_segment
from autopar.planner.explain import Explanation
from autopar.report.facts import facts, subject
from autopar.report.html import Markup, tag
from autopar.report.page import page
from autopar.report.seconds import WORK, work
from autopar.report.units import count, format_bytes, percent
from autopar.report.why import answers, questions
from autopar.solver.shrink import shrink
from autopar.text.times import format_time
from tests.plans import made
from tests.profiled import BATCH, LAYERS, SEQUENCE, SIZES, VARIANTS, folded, plan

VOID = {"meta", "br", "wbr", "img", "hr"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Parsed(html.parser.HTMLParser):
    """Elements with their attributes; fails where one is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, (name, self.open[-3:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


def one(name: str = "plain") -> str:
    return page([("plan.json", plan(name))])


@pytest.mark.parametrize("name", VARIANTS)
def test_it_parses_and_has_its_sections(name: str) -> None:
    parsed = Parsed(one(name))
    ids = [a["id"] for n, a in parsed.elements if n == "section"]
    assert ids == ["time", "memory", "timeline", "exposed", "layers", "parameters", "why"]
    assert sum(n == "svg" for n, _ in parsed.elements) == 4  # memory, the step, a layer forward and backward
    assert len(one(name)) < 3_000_000


@pytest.mark.parametrize("text", [one, lambda: page([("a", plan()), ("b", plan("little memory"))])])
def test_nothing_outside_is_referred_to(text: object) -> None:
    found = text()  # type: ignore[operator]
    parsed = Parsed(found)
    assert not {n for n, _ in parsed.elements} & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    assert not any(k in ("src", "href", "srcset", "action", "data") or k.startswith("on") for _, attrs in parsed.elements for k in attrs)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", found)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_says_the_plans_numbers(name: str) -> None:
    p, t = plan(name), plan(name).timeline()
    text = Parsed(one(name)).text
    step = p.predicted["step_time_s"]
    tokens = BATCH * SEQUENCE / step
    for said in (
        format_time(step), count(tokens), format_time(t.exposed_s), format_time(t.seconds), format_bytes(p.predicted["peak_memory_bytes"]),
        format_bytes(p.predicted["budget_bytes"]), percent(float(p.solver["gap"])), "Tokens/s", p.cluster, "dp=8",
    ):  # fmt: skip
        assert said in text, said
    for parameter in ("model.embed_tokens.weight", "model.layers.*.mlp.gate_proj.weight", f"{LAYERS} ×"):
        assert parameter in text
    assert ("made again in backward" in text) == any(work(e) == "again" and e.seconds > 1e-8 for e in t.events)
    assert (WORK["moving"] in text) == bool(p.offload)


def test_mfu_is_that_of_the_models_formula() -> None:
    """Six FLOPs a token and weight of a product, and causal attention: 2 x 2 b h s^2 d / 2 forward, three times that with backward."""
    hidden, inner, heads, kv, words = (
        SIZES[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    )
    weights = LAYERS * (2 * hidden * hidden + 2 * hidden * hidden * kv // heads + 3 * hidden * inner) + hidden * words
    attention = 3 * LAYERS * 2 * BATCH * hidden * SEQUENCE**2
    flops = 6 * weights * BATCH * SEQUENCE + attention
    found = {f.key: f.value for f in facts(subject("", plan()))}
    assert found["mfu"] == pytest.approx(flops / (plan().predicted["step_time_s"] * 8 * 989e12), rel=1e-6)
    assert {f.key: f.value for f in facts(subject("", plan("little memory")))}["mfu"] < found[
        "mfu"
    ]  # what runs again is no work of the model's


def test_parameters_add_up_to_what_memory_shows() -> None:
    parsed = Parsed(one())
    peak = plan().timeline().peak
    assert peak is not None
    assert f"in all{count(sum(_elements(c.shape) for c in plan().params.values()))}" in "".join(parsed.said)
    assert parsed.text.count(format_bytes(peak.nbytes["parameters"])) >= 2  # in the table of parameters and at the peak


def _elements(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def test_segments_of_layers_add_up() -> None:
    """Where layers have policies of their own, a row says of how many; all of them together are all layers."""
    p = plan("little memory")
    counts = p.segments["model.layers"]
    assert sum(counts) == LAYERS and len(counts) > 1
    rows = re.findall(r"<tr>.*?</tr>", one("little memory").partition('id="layers"')[2].partition("</section>")[0])
    told = [[int(n) for n in re.findall(rf"(\d+) of {LAYERS} layers:", row)] for row in rows]
    assert any(len(x) > 1 for x in told) and all(sum(x) <= LAYERS for x in told)
    for cut in ((2, 3, 1), (4, 2), (1, 5), (6,)):
        small = shrink(folded(), {"model.layers": cut})
        (stack,) = small.fold.stacks
        assert small.segment[stack.forward[-2][0]] == middle_segment(cut), cut


def test_two_plans_side_by_side() -> None:
    a, b = plan(), plan("little memory")
    parsed = Parsed(page([("a.json", a), ("b.json", b)]))
    assert sum(n == "svg" for n, _ in parsed.elements) == 8
    assert a.predicted["peak_memory_bytes"] > b.predicted["peak_memory_bytes"]
    for p in (a, b):
        assert format_time(p.predicted["step_time_s"]) in parsed.text and format_bytes(p.predicted["peak_memory_bytes"]) in parsed.text
    change = b.predicted["peak_memory_bytes"] / a.predicted["peak_memory_bytes"] - 1
    assert f"{change:+.1%}" in parsed.text and a.diff(b).splitlines()[0] in parsed.text
    assert "nothing: the plans are equal" in Parsed(page([("a", a), ("b", a)])).text


def test_names_cannot_put_anything_into_the_page() -> None:
    evil = '<script>alert("x")</script>&"\''
    p = plan()
    params = {f"{evil}.{n}": c for n, c in p.params.items()}
    assert p.profile is not None
    whats = tuple(dataclasses.replace(w, module=evil, name=evil) for w in p.profile.whats)
    bad = dataclasses.replace(
        p, params=params, cluster=evil, modules=dict.fromkeys(p.modules, evil), profile=dataclasses.replace(p.profile, whats=whats)
    )
    parsed = Parsed(page([(evil, bad)]))
    assert "script" not in {n for n, _ in parsed.elements} and evil in "".join(parsed.said)
    assert tag("p", Markup("<b>x</b>"), "<i>", title='"') == '<p title="&quot;"><b>x</b>&lt;i&gt;</p>'


def test_answers_are_shown_as_they_were_given() -> None:
    s, asked = subject("plan.json", plan()), list[tuple[str, str]]()

    def ask(op: str, placement: str) -> Explanation:
        asked.append((op, placement))
        if len(asked) == 2:
            raise AutoparError("too many axes")
        return Explanation("costs", f"{op}: {placement}\nAs asked, twice as long.", 1.0, 2.0)

    found = answers(s, ask)
    assert asked == questions(s) and len(asked) == 4 and {p.partition(":")[0] for _, p in asked[:3]} == {"dp"}
    text = Parsed(page([("plan.json", plan())], [found])).text
    assert "As asked, twice as long." in text and "+100.0%" in text and "too many axes" in text
    assert "autopar explain" in Parsed(one()).text  # without answers it says how to ask


def test_units() -> None:
    assert [count(x) for x in (327412.6, 4.31e9, 12.0, 0.5)] == ["327,413", "4.31 billion", "12", "0.50"]


def test_the_command(tmp_path: Path) -> None:
    plan().save(tmp_path / "a.json")
    plan("offload").save(tmp_path / "b.json")
    out = tmp_path / "p.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(out)])
    assert done.exit_code == 0 and "a.json ↔ b.json" in Parsed(out.read_text()).text
    dataclasses.replace(plan(), profile=None).save(tmp_path / "old.json")
    made("tiny", {"dp": 2}, "fsdp").save(tmp_path / "hand.json")
    for file in ("old.json", "hand.json", "none.json"):
        failed = CliRunner().invoke(app, ["report", str(tmp_path / file), "-o", str(tmp_path / "q.html")])
        assert failed.exit_code == 2 and failed.stderr.startswith("error: ") and "fix: " in failed.stderr, file
    assert not (tmp_path / "q.html").exists()


def test_why_plans_the_same_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the file says of it; another program is refused. Planning itself is replaced."""
    called: list[tuple[tuple[object, ...], dict[str, object]]] = []
    recomputed_calls = [
        dataclasses.replace(plan("offload")).explained_by(lambda op, placement: Explanation("costs", f"{op}\nTwice as long.", 1.0, 2.0))
    ]

    def again(*args: object, **kwargs: object) -> Plan:
        called.append((args, kwargs))
        return recomputed_calls[0]

    monkeypatch.setattr("autopar.planner.offline.plan", again)
    monkeypatch.setattr(cli_report, "built", lambda model, layers, batch, seq: ((model, layers), (batch, seq)))
    plan("offload").save(tmp_path / "a.json")
    command = ["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "p.html"), "--why", "some-model"]
    assert CliRunner().invoke(app, command).exit_code == 0
    (args, kwargs) = called[0]
    assert args == (("some-model", None), (BATCH, SEQUENCE), plan("offload").cluster, {"dp": 8})
    assert kwargs["memory"] == plan("offload").predicted["budget_bytes"] and kwargs["offload"] == "host" and kwargs["layout"] is None
    assert Parsed((tmp_path / "p.html").read_text()).text.count("Twice as long.") == 4
    recomputed_calls[0] = dataclasses.replace(plan("offload"), fingerprint="another")
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 2 and "is not of some-model" in failed.stderr


# ---- in a browser --------------------------------------------------------------------------------------------------


def rendered(file: Path, dark: bool) -> tuple[list[str], bytes]:
    """What the browser's console says, and a picture."""
    assert BROWSER is not None
    picture = file.with_suffix(".dark.png" if dark else ".light.png")
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={file.parent / 'profile'}", "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1320,3000", f"--screenshot={picture}", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert picture.exists(), done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], picture.read_bytes()


def corner(png: bytes) -> tuple[int, ...]:
    """The colour of the first pixel: in front of it there is nothing, so no filter of PNG changes it."""
    at, data = 8, b""
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    return tuple(zlib.decompress(data)[1:4])


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
def test_it_renders_without_an_error_in_light_and_dark(tmp_path: Path) -> None:
    """The pictures stay in the folder that pytest made: look at them there."""
    file = tmp_path / "page.html"
    file.write_text(page([("a.json", plan()), ("b.json", plan("offload"))]), encoding="utf-8")
    for dark in (False, True):
        said, picture = rendered(file, dark)
        assert said == []
        assert len(picture) > 50_000  # an empty page has a tenth of it
        assert (max(corner(picture)) < 64) if dark else (min(corner(picture)) > 192)
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><title>x</title><script>nothing.at.all()</script>", encoding="utf-8")
    assert any("nothing" in line for line in rendered(broken, False)[0])  # the console is heard


def test_a_page_is_of_one_plan_or_two() -> None:
    with pytest.raises(AutoparError, match="one plan or two"):
        page([("a", plan())] * 3)
    with pytest.raises(AutoparError):
        page([("a", Plan.load("/nonexistent.json"))])
