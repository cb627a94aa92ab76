"""How the page looks, in light and in dark. Colours of kinds of work and of memory are told apart by hue and by lightness, also without colour vision."""

from __future__ import annotations

_LIGHT = """
  --bg: #fbfbfa; --panel: #ffffff; --ink: #1c2330; --dim: #667085; --line: #e4e6ea; --lane: #f3f4f6; --grid: #e9ebee; --accent: #2f5fd0; --good: #13794a; --bad: #b42318;
  --m0: #33508f; --m1: #6f86c4; --m2: #d99a1c; --m3: #9aa3b0; --m4: #35a3c4; --m5: #4c9a5f; --m6: #d9603b; --m7: #a9cf8f; --m8: #a05fb4;
  --product: #2f5fd0; --attention: #7b4fc4; --other: #8fb0ea; --again: #e07a2f; --slow: #b9bfca; --step: #5d6b82; --parameter: #2a9db5; --gradient: #d99a1c; --activation: #cf4b7d;
  --moving: #4c9a5f; --wait: #d92d20; --on-other: #14305f;
"""
_DARK = """
  --bg: #12151b; --panel: #191d25; --ink: #e7eaf0; --dim: #98a2b3; --line: #2b313c; --lane: #20252f; --grid: #2a303b; --accent: #7ea2ff; --good: #58c48d; --bad: #ff8a7d;
  --m0: #5577c9; --m1: #8d9fe0; --m2: #e0ab3f; --m3: #78828f; --m4: #4bb4d2; --m5: #58ad6d; --m6: #e87552; --m7: #a7d08d; --m8: #b982cc;
  --product: #5c86f0; --attention: #a07fe6; --other: #3f5d99; --again: #ee9150; --slow: #596273; --step: #8a97ad; --parameter: #43b3cb; --gradient: #e0ab3f; --activation: #e36a97;
  --moving: #58ad6d; --wait: #ff6a5c; --on-other: #e7eaf0;
"""
_MEMORY = "".join(f".m-{i} {{ fill: var(--m{i}); background: var(--m{i}); }}\n" for i in range(9))
_KINDS = ("product", "attention", "other", "again", "slow", "step", "parameter", "gradient", "activation", "moving", "wait")
_WORK = "".join(f".w-{k} {{ fill: var(--{k}); background: var(--{k}); }}\n" for k in _KINDS)

CSS = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 32px 60px; max-width: 1280px; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; }
body.two { max-width: 1560px; }
.brand { color: var(--accent); font-size: 12px; font-weight: 650; letter-spacing: .08em; text-transform: uppercase; }
h1 { margin: 2px 0 4px; font-size: 27px; line-height: 1.25; font-weight: 680; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 19px; font-weight: 650; letter-spacing: -.005em; }
h3.whose { margin: 0 0 8px; font-size: 14px; color: var(--dim); font-weight: 600; overflow-wrap: anywhere; }
h4 { margin: 18px 0 2px; font-size: 13.5px; font-weight: 600; color: var(--dim); }
.about { margin: 0 0 6px; color: var(--dim); display: flex; flex-wrap: wrap; gap: 4px 6px; }
.about span { background: var(--lane); border-radius: 5px; padding: 1px 8px; font-size: 13.5px; }
section { margin-top: 26px; padding: 20px 22px 22px; background: var(--panel); border: 1px solid var(--line); border-radius: 12px; }
.lead { margin: 3px 0 14px; color: var(--dim); max-width: 92ch; }
.note { color: var(--dim); margin: 8px 0 0; }
footer { margin-top: 26px; color: var(--dim); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(185px, 1fr)); gap: 12px; margin-top: 16px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; padding: 13px 15px 12px; }
.card .t { color: var(--dim); font-size: 12.5px; white-space: nowrap; }
.card .v small { font-size: 13px; font-weight: 560; color: var(--dim); white-space: nowrap; letter-spacing: 0; }
.card .v { font-size: 21px; font-weight: 660; letter-spacing: -.01em; line-height: 1.3; }
.card .s { color: var(--dim); font-size: 12.5px; line-height: 1.4; }
.bar { height: 5px; border-radius: 3px; background: var(--lane); margin: 5px 0 6px; overflow: hidden; }
.bar i { display: block; height: 100%; border-radius: 3px; background: var(--accent); }
.sides { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 28px; }
.side { min-width: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
table.small { width: auto; min-width: 420px; margin-top: 12px; }
caption { text-align: left; color: var(--dim); padding: 0 10px 4px 0; }
th { text-align: left; font-weight: 600; color: var(--dim); font-size: 12.5px; border-bottom: 1px solid var(--line); padding: 5px 12px 5px 0; white-space: nowrap; vertical-align: bottom; }
td { border-bottom: 1px solid var(--line); padding: 5px 12px 5px 0; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th.n, td.n { text-align: right; white-space: nowrap; }
table.compare { margin-top: 14px; background: var(--panel); border: 1px solid var(--line); border-radius: 12px; border-collapse: separate; border-spacing: 0; }
table.compare th, table.compare td { padding: 8px 16px; }
table.compare td { font-size: 15px; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
code, pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
td code { overflow-wrap: break-word; }
body.two .because { display: none; }
body.two .place { white-space: normal; }
body.two th { white-space: normal; }
body.two td, body.two th { padding-right: 9px; }
body.two table.compare td, body.two table.compare th { padding: 8px 16px; }
td:first-child { min-width: 120px; }
pre { margin: 8px 0 0; padding: 12px 14px; background: var(--lane); border-radius: 8px; overflow-x: auto; }
.dim { color: var(--dim); }
.place, .policy, .verdict { display: inline-block; border-radius: 5px; padding: 0 7px; font-size: 12.5px; background: var(--lane); white-space: nowrap; }
.place.whole { color: var(--dim); }
.policy { border-left: 3px solid var(--m5); } .policy.f-recompute { border-left-color: var(--again); } .policy.f-offload { border-left-color: var(--m8); }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--dim); margin-bottom: 8px; }
.answers details { border-top: 1px solid var(--line); padding: 9px 0; } .answers details:first-child { border-top: 0; }
summary { cursor: pointer; }
.verdict { font-weight: 600; }
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--dim); font-size: 11.5px; }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .lane { fill: var(--lane); }
svg .mark { stroke: var(--dim); stroke-width: 1; stroke-dasharray: 3 3; }
svg .stage { font-weight: 600; font-size: 12px; } svg .track { font-size: 12px; } svg .under, svg .long { font-size: 10px; }
svg line.budget { stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 6 4; } svg text.budget { fill: var(--bad); }
svg circle.peak { fill: var(--panel); stroke: var(--ink); stroke-width: 1.6; } svg text.peak { fill: var(--ink); font-weight: 600; font-size: 12.5px; paint-order: stroke; stroke: var(--panel); stroke-width: 3px; }
svg .in { fill: #ffffff; font-size: 10.5px; pointer-events: none; }
svg .in-other, svg .in-slow { fill: var(--on-other); }
svg .hit { fill: transparent; } svg .hit:hover { fill: var(--ink); fill-opacity: .12; }
svg rect[class^="w-"]:hover { fill-opacity: .72; }
@media (max-width: 820px) { body { padding: 18px 14px 40px; } .sides { grid-template-columns: minmax(0, 1fr); } section { padding: 16px 14px; } svg.chart { min-width: 640px; } section { overflow-x: auto; } .because { display: none; } }
@media print { section { break-inside: avoid; } }
"""
    + _MEMORY
    + _WORK
)
