"""Devices and models by the names that people write."""

from __future__ import annotations

import re
from functools import cache

from autopar.hardware.cluster import Cluster, names
from autopar.text.strict_json import short

# Dense models by the layer they have: RMSNorm, gated MLP, rotary grouped-query attention, or LayerNorm, GELU (or as cheap), a whole head of keys each.
LLAMA = r"llama|alpaca|vicuna|(?<![a-z])(?:mistral|qwen|yi|internlm-?2|deepseek-?(?:llm|coder|\d+b))(?![a-z])"
GPT = r"gpt|(?<![a-z])(?:mpt|opt|bloomz?|mt-nlg|megatron-turing)(?![a-z])"
EXPERTS = (
    r"moe|mixtral|(?<![a-z])experts?(?![a-z])|dbrx|grok|gpt-?oss|llama-?4(?=$|-)|deepseek-?(?:coder-?)?(?:v[23]|r1)(?!-distill)"
    r"|\d-?x-?\d+(?:\.\d+)?-?b(?![a-z])|-a\d+(?:\.\d+)?b|\d+b-\d+e(?![a-z])"
)
# Of a family by their names, with other layers.
OTHERS = {
    r"gpt-?neo|gpt-?j(?![a-z])|pythia|falcon|palm": "attention and MLP side by side, or local attention",
    r"bigcode|starcoder|santacoder": "one head of keys for all",
    r"llama-?3\.2-?(?:11|90)b|vision|-vl(?![a-z])": "images",
}
HEADS = r"qwen-?3(?![0-9])|mistral-?(?:nemo|small)"  # their heads have 128 elements, whatever hidden is


def kind(model: str) -> str:
    """Of two layers that are built here, "llama" or "gpt". Raises ValueError for any other layer."""
    text = re.sub(r"[\s_]+", "-", model.lower())
    if re.search(EXPERTS, text):
        raise ValueError(f"{short(model)!r} is a mixture of experts, which is not priced")
    for words, what in OTHERS.items():
        if re.search(words, text):
            raise ValueError(f"{short(model)!r} has layers that are not priced: {what}")
    if re.search(LLAMA, text):
        return "llama"
    if re.search(GPT, text):
        return "gpt"
    raise ValueError(
        f"{short(model)!r} is no model that is known: dense ones with layers as Llama (mistral, qwen, yi, deepseek-llm, ...) or GPT (mpt, opt, bloom)"
    )


def check(model: str, hidden: int, heads: int) -> None:
    """Raises ValueError where heads are known to be of another width than is priced."""
    if re.search(HEADS, re.sub(r"[\s_]+", "-", model.lower())) and hidden != 128 * heads:
        raise ValueError(f"{short(model)!r} has heads of 128 elements, which {heads} of hidden {hidden} are not: not priced")


@cache
def _described() -> dict[str, dict[str, int]]:
    """Names of clusters with gigabytes of a device, by chip."""
    out: dict[str, dict[str, int]] = {}
    for name in names():
        if size := re.search(r"(\d+)GB", Cluster.of(name).device.name):
            out.setdefault(name.partition("-")[0], {})[name] = int(size[1])
    return out


def device(said: str, notes: list[str]) -> str:
    """A cluster's name. Memory that is not stated, of a chip that comes with several, is assumed."""
    text = said.lower().strip()
    if text in names():
        if len(sizes := _described().get(text, {})) > 1:
            notes.append(f"{short(said)!r} is taken to have {sizes[text]} GB")
        return text
    known = _described()
    found = set(re.findall(rf"(?<![a-z0-9])(?:\d+x|hgx|dgx)?({'|'.join(known)})(?=sxm|[^a-z0-9]|$)", text))
    if len(found) != 1:
        raise ValueError(f"{short(said)!r} is no device that is known: {', '.join(names())}")
    if re.search(r"pci-?e|nvl(?!ink)", text) and "sxm" not in text:
        raise ValueError(f"{short(said)!r}: only devices on SXM boards are known: {', '.join(names())}")
    (chip,) = found
    sizes = known[chip]
    # Gigabytes: no gigabits of a network, nor rates. Or "A100-40".
    stated = [int(x) for x in re.findall(r"(?<![A-Za-z0-9.])(\d{1,6})[ _-]?(?:GB|gb|GiB|gib|G)(?![A-Za-z0-9/])", said)]
    bare = [int(x) for x in re.findall(rf"{chip}[ _-](\d+)(?![a-z0-9])", text) if int(x) in sizes.values()]
    fits = [name for name, size in sizes.items() if any(abs(x / size - 1) <= 0.1 for x in stated or bare)]
    if (stated or bare) and len(fits) != 1:
        raise ValueError(f"{short(said)!r}: a {chip} is known with {' or '.join(map(str, sizes.values()))} GB")
    if not fits and len(sizes) > 1:
        notes.append(f"{short(said)!r} is taken to have {max(sizes.values())} GB")
    return fits[0] if fits else max(sizes, key=lambda name: sizes[name])
