"""The page's Python: one function that takes a request as JSON and returns an answer as JSON.

It runs in the page and under CPython alike. A run is a list of [name, value] pairs of text, with the names of the flags
of `vaemem fits`, and "model", "op", "height" and "width". The page's form, its address and this file share them.
"""

import functools
import json
import shlex
import warnings

import vaemem
from vaemem._render import COLOURS, Bullets, in_gb, share
from vaemem.prediction.verdict import DOES_NOT_FIT, FITS, TIGHT

KEYWORDS = {"torch": "torch_version", "cudnn": "cudnn_version", "tokens": "prompt_tokens", "component": "components"}
KEYWORDS["hires-from"] = "image"
OFF = {"no-tf32": "allow_tf32", "no-guidance": "guidance"}
NUMBERS = dict.fromkeys(("height", "width", "batch", "frames", "tile", "tokens", "steps"), int)
NUMBERS["tile-overlap"] = float
PARTS = {"weights": "weights", "tensors": "activations", "workspaces": "workspace", "cached": "cached"}
PART_NAMES = {"cached": "PyTorch's cache", "others": "other programs", "Windows": "kept by Windows", "spare": "free"}
POINTS = 240  # of a timeline
SHOWN_WAYS = 8  # of a plan
# A longer search that the page offers: its name in a request, and in words.
FURTHER = {
    "run": ("largest", "Find the largest image and the largest batch"),
    "pipeline": ("plan", "Compare all ways of running it"),
}


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
        elif name == "hires-from":
            sides = [_number(int, side) for side in value.split("x")]
            found[keyword] = sides[0], sides[-1]
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
            is_option = value.startswith("--")  # as those of ComfyUI are
            words += [f"--{name}={value}"] if is_option else [f"--{name}", *[value] * (value != "on")]
    return shlex.join(words)


def _run_of(command, run=()):
    """Return the run of a command; if it has only flags, `run` with these flags. None for another command."""
    words, found = shlex.split(command), []
    if words[0] == "vaemem":
        if words[1] != "fits":
            return None
        op = [] if words[3][0].isdecimal() else [words.pop(3)]  # a pipeline has none
        height, width = words[3].split("x")
        found = [["model", words[2]], *(["op", one] for one in op), ["height", height], ["width", width]]
        run, words = (), words[4:]
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
    verb = "needed" if judged.verb == "needs" else "taken"
    needed, meaning = judged.here[1], f"{verb} of the {gives} that the card gives"
    caption = "What fills the card:"
    if judged.took is None:
        needed, meaning = judged.least, f"needed at least; the card gives {gives}"
        caption = f"On a card with room for everything it would take {in_gb(judged.most)}:"
        if judged.verb == "needs":
            caption = "What fills the card when memory runs out:"
    clauses = (f"{clause[0].upper()}{clause[1:]}." for clause in answer.summary.split("; "))
    return {
        "verdict": answer.verdict, "sentences": [*clauses, *answer._costs(in_gb), *filter(None, [answer.assumed_card])],
        "bytes": needed, "number": in_gb(needed), "meaning": meaning, "caption": caption,
        "available": answer.available, "size": answer.card.gpu.reported_memory, "gives": gives,
        "parts": _parts(answer._parts), "phases": _phases(answer),
        "facts": [pair for pair in [*answer.facts(in_gb), *answer._facts(in_gb), *_placed(answer)] if pair[1]],
        "notes": list(answer.notes), "command": _command(run),
        "further": FURTHER[answer.kind],
    }  # fmt: skip


def _parts(sizes):
    return [[PART_NAMES.get(name, name), size, in_gb(size), COLOURS[name]] for name, size in sizes.items() if size > 0]


def _phases(answer):
    """Return a pipeline's phases: [name, outcome, total, parts]."""
    if answer.kind != "pipeline":
        return []
    outcomes, parts = [row[1] for row in answer._grid(in_gb).rows], PARTS | {answer._outside: "outside"}
    return [
        [phase.name, outcome, in_gb(phase.total), _parts({part: getattr(phase, of) for part, of in parts.items()})]
        for phase, outcome in zip(answer.phases, outcomes, strict=True)
    ]


def _placed(answer):
    """Return a line for each phase: which models ComfyUI has on the card, and the bytes that it sends."""
    if not hasattr(answer, "paged"):
        return []
    _, table, _ = answer._blocks(in_gb)
    pairs = [[row[0], zip(table.header[1:], row[1:], strict=True)] for row in table.rows]
    return [[phase, ", ".join(f"{name} {text}" for name, text in cells if text)] for phase, cells in pairs]


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
    if dict(run).get("runtime") in ("sd.cpp", "comfyui"):
        return {"ways": plan(run)["ways"]}
    return {"ways": _ways(answer.would_fit, run)}


def _ways(advice, run=()):
    return [
        {
            "what": one.what, "verdict": one.verdict, "outcome": one.describe(in_gb).removeprefix(f"{one.what}: "),
            "command": one.command, "run": _run_of(one.command, run),
        }
        for one in advice
    ]  # fmt: skip


def plan(run):
    """Return the ways of running a pipeline that go through, the recommended one first, and why."""
    rest = [pair for pair in run if pair[0] not in ("offload", "vae", "vae-memory-limit")]
    given = _keywords(rest)
    found = vaemem.plan_pipeline(given.pop("model"), **given)
    through = [one for one in found.outcomes if one.verdict != DOES_NOT_FIT]
    through.sort(key=lambda one: (one is not found.recommended, one.verdict != FITS, bool(one.way.changes)))
    ways = [_planned(one, rest, found.room.card) for one in through]
    return {"sentences": [found.reason], "ways": ways[:SHOWN_WAYS]}


def _planned(one, rest, room):
    way, settings = one.way, _settings(one.way)
    takes = f"takes {share(max(phase.total for phase in way.phases), room, in_gb)}"
    outcome = ", ".join(
        [one.summary, takes, *[str(one.seconds)] * bool(one.seconds), *[way.changes] * bool(way.changes)]
    )
    kept = [list(pair) for pair in rest if pair[0] not in dict(settings)]
    return {
        "what": way.name, "verdict": one.verdict, "outcome": outcome, "command": way.code, "run": [*kept, *settings],
    }  # fmt: skip


def _settings(way):
    """Return a way's settings as pairs. Those of stable-diffusion.cpp are its options, which the way's name means."""
    if "offload" not in way.settings:
        return [["offload", way.name]]
    pairs = []
    for name, value in way.settings.items():
        if name == "components":
            pairs += [["component", f"{role}={kind}"] for role, kind in value.items()]
        else:
            places = value if isinstance(value, str) else ",".join(f"{role}={place}" for role, place in value.items())
            pairs.append([name.replace("_", "-"), places])
    return pairs


def largest(run):
    """Return two runs of a VAE: the largest image of the run's shape, and the largest batch of its size. Each fits, or
    is tight if none fits."""
    given = _keywords(run)
    height, width, batch = given.pop("height"), given.pop("width"), given.pop("batch", 1)
    searches = {
        "the largest image of this shape": lambda safe: dict(
            zip(
                ("height", "width"),
                vaemem.predict_largest(**given, batch=batch, aspect=width / height, safe=safe),
                strict=True,
            )
        ),
        "the largest batch of this size": lambda safe: {
            "batch": vaemem.largest_batch(**given, height=height, width=width, safe=safe)
        },
    }
    ways = []
    for what, search in searches.items():
        for safe in (True, False):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that larger ones were not tried
                    found = search(safe)
            except ValueError:  # none does
                continue
            verdict = FITS if safe else TIGHT
            sizes, changed = "x".join(map(str, found.values())), [[name, str(size)] for name, size in found.items()]
            rest = [list(pair) for pair in run if pair[0] not in found]
            ways.append({"what": f"{what}: {sizes}", "verdict": verdict, "outcome": verdict, "run": [*rest, *changed]})
            break
    return {"sentences": [] if ways else ["Not even one image goes through."], "ways": ways}


def explain(message):
    """Explain an out-of-memory message."""
    found = vaemem.explain(message)
    sheet, prediction = found._sheet(in_gb), found.prediction
    return {
        "sentences": [sheet.headline],
        "lists": [[block.title, list(block.items)] for block in sheet.blocks if isinstance(block, Bullets)],
        "run": prediction and _run_of(found.command),
        "ways": _ways(prediction.would_fit, _run_of(found.command)) if prediction else [],
    }  # fmt: skip


def ask(text):
    """Answer one request: {"do": "explain", "message": ...}; or with "run": "predict", "timeline", "instead", "plan" of
    a pipeline, "largest" of a VAE. An error is {"error": message, "argument": the name of the field, or ""}."""
    request = json.loads(text)
    do, run = request["do"], tuple((name, value) for name, value in request.get("run", ()))
    try:
        known = {one.__name__: one for one in (predict, timeline, instead, plan, largest)}
        found = explain(request["message"]) if do == "explain" else known[do](run)
    except Exception as error:  # whatever it is, the page shows it
        argument = getattr(error, "argument", "").partition(",")[0].partition("[")[0]
        names = {keyword: name for name, keyword in KEYWORDS.items()} | {"pipeline": "model", "error": "message"}
        found = {"error": str(error) or type(error).__name__}
        found["argument"] = names.get(argument, argument.replace("_", "-"))
    return json.dumps(found)
