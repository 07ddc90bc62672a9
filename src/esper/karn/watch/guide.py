"""Texts of the help screen."""

from __future__ import annotations

from esper.karn.watch.lines import Line, wrap

KEYS = (
    ("j k ↓ ↑", "move among environments, or scroll"),
    ("g G PgUp PgDn", "first, last, a page up or down"),
    ("Enter", "everything about the selected environment"),
    ("e", "all events, full screen"),
    ("/", "filter environments by name, number or state; Esc clears"),
    ("r", "read the run again from its beginning"),
    ("?", "this page"),
    ("Esc q", "back; q on the first page quits (the run goes on)"),
)
STATES = (
    ("LIVE", "events arrive as they usually do"),
    ("SLOW STALE", "silent for longer than this run's own pauses; for much longer"),
    ("FINISHED FAILED INTERRUPTED", "how the run says that it ended"),
    ("KILLED", "it has no end, and no process owns it"),
    ("WAITING", "nothing has been written yet"),
    ("ALL CLEAR", "no alarm now and none before; NOTES: alarms that are past, or harmless gaps in the journal"),
)
STAGES = (
    ("·", "empty: no seed"),
    ("G germinated", "attached, nothing learnt yet"),
    ("T training", "learns; the host cannot feel it"),
    ("B blending", "alpha is on its way, or rests below 1"),
    ("H holding", "full strength, waiting for the verdict"),
    ("F fossilised", "part of the host for good"),
    ("x cooling", "pruned; the slot is empty again after a while"),
)
GLOSSARY = (
    ("host", "the network being trained"),
    ("slot, seed", "a place in the host; the small module that lives there"),
    ("alpha", "how much of a seed reaches the host, 0 to 1"),
    ("step", "one decision, then one epoch of training and a validation"),
    ("quality", "on the validation split, in percent if it is a fraction; COMMIT: with every live seed off"),
    ("CONTRIB", "quality with the seed minus without it, in points, ± its standard error; of a fossil: what would be "
                "lost now. Coloured where it exceeds two standard errors"),
    ("PROSPECT", "what a training seed would add at alpha 1; SE is the standard error, as in every column"),
    ("SHAPLEY, SOLO", "its fair share of what all seeds bring; what it brings alone"),
    ("HEALTH", "of its gradients: 1 is healthy, 0 is dead or exploding"),
    ("AGE", "steps in this stage"),
    ("LAST OP", "the last decision that was not to wait; -3: three steps ago"),
    ("STATE", "rising; flat: no new best for 10 steps; worse: a point below its best; rolled: the governor acted; "
              "broken: not finite; ended; waiting"),
    ("OPS", "what was chosen on free steps, where there was a choice. A step to wait counts as forced if all slots "
            "were fossilised or cooling, unless the journal says which ops were legal"),
    ("TWIN", "quality minus that of the same world without growth"),
    ("KL, clip", "how far an update moved the policy; the share of ratios that were clipped"),
    ("entropy", "per head, over free steps: 1 is undecided, below 0.1 it no longer explores"),
    ("return", "the sum of an episode's rewards; shown is the mean over the round's episodes ± their standard "
               "deviation (sd)"),
    ("NRMSE", "error of the critic over the spread of returns: below 1 it predicts something"),
    ("–", "not measured. NaN and inf are measured, and trouble"),
)  # fmt: skip


def help_lines(width: int) -> list[Line]:
    """Return the lines of the help screen."""
    out: list[Line] = []
    for title, rows in (("KEYS", KEYS), ("THE RUN", STATES), ("STAGES OF A SEED", STAGES), ("WORDS", GLOSSARY)):
        out += [*([()] if out else []), ((title, "strong"),)]
        for word, meaning in rows:
            first, *more = wrap(meaning, max(20, width - 18))
            if len(word) > 15:
                out.append(((f"  {word}", "note"),))
                word = ""
            out.append(((f"  {word:<15} ", "note"), (first, "plain")))
            out += [((" " * 18, "plain"), (m, "plain")) for m in more]
    return out
