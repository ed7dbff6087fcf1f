"""The page's Python: one function that takes a request as JSON and returns an answer as JSON.

It runs in the page and under CPython alike. A run is a list of [name, value] pairs of text, with the names of the flags
of `vaemem fits`, and "model", "op", "height" and "width". The page's form, its address and this file share them.
"""

import functools
import json
import shlex

import vaemem
from vaemem._render import COLOURS, Bullets, in_gb, share
from vaemem.prediction.verdict import DOES_NOT_FIT, FITS

KEYWORDS = {"torch": "torch_version", "cudnn": "cudnn_version", "tokens": "prompt_tokens", "component": "components"}
OFF = {"no-tf32": "allow_tf32", "no-guidance": "guidance"}
NUMBERS = {"height": int, "width": int, "batch": int, "tile": int, "tokens": int, "steps": int, "tile-overlap": float}
PARTS = {"weights": "weights", "tensors": "activations", "workspaces": "workspace", "cached": "cached"}
PARTS["vaemem"] = "outside"
PART_NAMES = {"cached": "PyTorch's cache", "others": "other programs", "Windows": "kept by Windows", "spare": "free"}
POINTS = 240  # of a timeline
SHOWN_WAYS = 8  # of a plan


# ---- a run, as pairs ----


def _keywords(run):
    """Return the arguments of `vaemem.predict` or `vaemem.predict_pipeline`."""
    found = {}
    for name, value in run:
        keyword = KEYWORDS.get(name, name.replace("-", "_"))
        if name == "component":
            role, _, kind = value.partition("=")
            found.setdefault(keyword, {})[role] = kind
        elif name == "offload" and "=" in value:
            found[keyword] = dict(one.split("=", 1) for one in value.split(","))
        elif name in OFF:
            found[OFF[name]] = False
        else:
            found[keyword] = True if value == "on" else _number(NUMBERS[name], value) if name in NUMBERS else value
    return found


def _number(kind, value):
    """Return a number; or the text, which the package refuses."""
    try:
        return kind(value)
    except ValueError:
        return value


@functools.lru_cache(maxsize=4)
def _answer(run):
    given = _keywords(run)
    model, op = given.pop("model", ""), given.pop("op", "")
    return vaemem.predict(model, op, **given) if op else vaemem.predict_pipeline(model, **given)


def _command(run):
    """Return the command that gives the same answer in a terminal."""
    given = dict(run)
    sides = given.get("height", ""), given.get("width", "")
    words = ["vaemem", "fits", given.get("model", ""), *filter(None, [given.get("op")]), "x".join(sides)]
    for name, value in run:
        if name not in ("model", "op", "height", "width"):
            words += [f"--{name}", *[value] * (value != "on")]
    return shlex.join(words)


def _run_of(command, run=()):
    """Return the run of a command; if it has only flags, `run` with these flags. None for another command."""
    words, found = shlex.split(command), []
    if words[0] == "vaemem":
        if words[1] != "fits":
            return None
        height, width = words[4].split("x")
        run, found, words = (), [["model", words[2]], ["op", words[3]], ["height", height], ["width", width]], words[5:]
    flags = []
    for word in words:
        if word.startswith("--"):
            flags.append([word[2:], "on"])
        else:
            flags[-1][1] = word
    changed = [name for name, _ in flags]
    return [*(list(pair) for pair in run if pair[0] not in changed), *found, *flags]


# ---- answers ----


def predict(run):
    """Say whether a run fits: in a sentence, as a number, as a bar and, for a pipeline, phase by phase."""
    answer = _answer(run)
    judged, gives = answer.judged, in_gb(answer.available)
    needed, meaning = judged.here[1], f"taken of the {gives} that the card gives"
    caption = "What fills the card:"
    if judged.took is None:
        needed, meaning = judged.least, f"needed at least; the card gives {gives}"
        caption = f"On a card with room for everything it would take {in_gb(judged.most)}:"
    clauses = (f"{clause[0].upper()}{clause[1:]}." for clause in answer.summary.split("; "))
    return {
        "verdict": answer.verdict, "sentences": [*clauses, *filter(None, [answer.assumed_card])],
        "bytes": needed, "number": in_gb(needed), "meaning": meaning, "caption": caption,
        "available": answer.available, "size": answer.card.gpu.reported_memory, "gives": gives,
        "parts": _parts(answer._parts), "phases": _phases(answer),
        "facts": [pair for pair in [*answer.facts(in_gb), *answer._facts(in_gb)] if pair[1]],
        "notes": list(answer.notes), "command": _command(run),
    }  # fmt: skip


def _parts(sizes):
    return [[PART_NAMES.get(name, name), size, in_gb(size), COLOURS[name]] for name, size in sizes.items() if size > 0]


def _phases(answer):
    """Return a pipeline's phases: [name, outcome, total, parts]."""
    if answer.kind != "pipeline":
        return []
    outcomes = [row[1] for row in answer._grid(in_gb).rows]
    return [
        [phase.name, outcome, in_gb(phase.total), _parts({part: getattr(phase, of) for part, of in PARTS.items()})]
        for phase, outcome in zip(answer.phases, outcomes, strict=True)
    ]


def timeline(run):
    """Return the fullest moment of each stretch of a VAE's run, on a card with room: [name, allocated,
    reserved, both in words]."""
    answer = _answer(run)
    if answer.kind == "pipeline":
        return {"moments": []}
    moments = answer.timeline
    step = -(-len(moments) // POINTS)
    fullest = [max(moments[at : at + step], key=lambda one: one.allocated) for at in range(0, len(moments), step)]
    shown = [[*one, f"{in_gb(one.allocated)} allocated, {in_gb(one.reserved)} reserved"] for one in fullest]
    return {"moments": shown, "at": max(fullest, key=lambda one: one.allocated).name}


def instead(run):
    """Return other runs that fit, each with its pairs."""
    answer = _answer(run)
    if answer.verdict == FITS:
        return {"ways": []}
    if dict(run).get("runtime") == "sd.cpp":
        return {"ways": _planned(run)}
    return {"ways": _ways(answer.would_fit, run)}


def _ways(advice, run=()):
    return [
        {
            "what": one.what, "verdict": one.verdict, "outcome": one.describe(in_gb).removeprefix(f"{one.what}: "),
            "command": one.command, "run": _run_of(one.command, run),
        }
        for one in advice
    ]  # fmt: skip


def _planned(run):
    """Return the ways of a plan that go through, the recommended one first."""
    given = _keywords([pair for pair in run if pair[0] not in ("offload", "vae", "op")])
    plan = vaemem.plan_pipeline(given.pop("model"), **given)
    rest = [list(pair) for pair in run if pair[0] not in ("offload", "vae")]
    found = [plan.recommended, *(one for one in plan.outcomes if one is not plan.recommended)]
    return [
        {
            "what": one.way.name, "verdict": one.verdict, "command": one.way.code,
            "outcome": f"{one.summary}, takes {share(max(p.total for p in one.way.phases), plan.room.card, in_gb)}",
            "run": [*rest, ["offload", one.way.name]],
        }
        for one in found
        if one and one.verdict != DOES_NOT_FIT
    ][:SHOWN_WAYS]  # fmt: skip


def explain(message):
    """Explain an out-of-memory message."""
    from vaemem.prediction.predict import shell_command  # the first answer needs little of the package

    found = vaemem.explain(message)
    sheet, prediction = found._sheet(in_gb), found.prediction
    return {
        "sentences": [sheet.headline],
        "lists": [[block.title, list(block.items)] for block in sheet.blocks if isinstance(block, Bullets)],
        "run": prediction and _run_of(shell_command(prediction.request)),
        "ways": _ways(prediction.would_fit) if prediction else [],
    }  # fmt: skip


def ask(text):
    """Answer one request: {"do": "explain", "message": ...}; or "predict", "timeline" or "instead" with "run". An error
    is {"error": message, "argument": the name of the field, or ""}."""
    request = json.loads(text)
    do, run = request["do"], tuple((name, value) for name, value in request.get("run", ()))
    try:
        known = {"predict": predict, "timeline": timeline, "instead": instead}
        found = explain(request["message"]) if do == "explain" else known[do](run)
    except Exception as error:  # whatever it is, the page shows it
        argument = getattr(error, "argument", "").partition(",")[0].partition("[")[0]
        names = {keyword: name for name, keyword in KEYWORDS.items()} | {"pipeline": "model", "error": "message"}
        found = {"error": str(error) or type(error).__name__}
        found["argument"] = names.get(argument, argument.replace("_", "-"))
    return json.dumps(found)
