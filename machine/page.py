"""An episode as a page for a browser: what the agent saw and said, how sure it was of each token, V
before and Q after each response, and beside them the curves of the run.

There is no script in it and nothing from elsewhere, and all that was sampled is text.
"""
import math
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 1rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 0 0 .3rem }
figure { display: inline-block; width: 30rem; max-width: 100%; margin: 0 0 1rem }
svg { width: 100% } svg text { font: 11px system-ui, sans-serif; fill: #555 }
section { border-top: 1px solid #ccc; padding: .6rem 0 }
b { margin-right: 1rem; font-weight: 600; display: inline-block }
pre, p { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 }
pre { background: #f4f4f4; padding: .5rem; font-size: .85rem } summary { color: #555 }
p { font-family: ui-monospace, monospace } mark { color: inherit; border-radius: 2px }
"""
COLORS = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito
WIDTH, HEIGHT, LEFT, BOTTOM = 480, 180, 44, 24  # of a figure, and its margins


def figure(title, series, across):
    """{name: [(x, y), ...]} -> lines over `across` as HTML. What is not finite is left out."""
    series = {name: [(x, y) for x, y in points if math.isfinite(y)]
              for name, points in series.items()}
    xs = [x for points in series.values() for x, _ in points] or [0]
    ys = [y for points in series.values() for _, y in points] + [0.0]
    low, high, last = min(ys), max(ys), max(xs)
    if high == low:
        high = low + 1

    def place(x, y):
        return (LEFT + (x - min(xs)) / (last - min(xs) or 1) * (WIDTH - LEFT - 10),
                8 + (high - y) / (high - low) * (HEIGHT - BOTTOM - 8))

    out = [f'<figure><h2>{escape(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for y in {low, 0.0, high} if low < -0.1 * high else (0.0, high):
        _, down = place(0, y)
        out.append(f'<path d="M{LEFT} {down:.1f}H{WIDTH - 10}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 4}" y="{down + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for (name, points), color in zip(series.items(), COLORS):
        at = [place(x, y) for x, y in points]
        out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" '
                   f'stroke="{color}" stroke-width="1.5"/>')
        if len(at) <= 60:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in at]
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{min(xs):g}</text><text x="{WIDTH - 10}" '
               f'y="{HEIGHT - 6}" text-anchor="end">{last:g}, {escape(across)}</text></svg>')
    names = [f'<b style="color:{color}">{escape(name)}</b>' for name, color in zip(series, COLORS)]
    return "".join([*out, *names, "</figure>"])


def response(turn, decode):
    """The tokens of a response, the darker the less probable they were."""
    out, done = [], 0  # tokens that are shown
    for n, logp in enumerate(turn.logp):
        before = turn.action_ids[max(0, done - 1):done]  # spaces depend on the neighbour
        text = decode(before + turn.action_ids[done:n + 1])[len(decode(before)):]
        if text.endswith("\ufffd") and n + 1 < len(turn.logp):
            text = ""  # a part of a character, which is shown with the next
        else:
            done = n + 1
        shade = 1 - math.exp(logp) if math.isfinite(logp) else 1
        out.append(f'<mark style="background:rgba(230,159,0,{shade:.2f})" '
                   f'title="log-prob {logp:.3f}">{escape(text)}</mark>')
    return "".join(out)


def episode_page(title, turns, lines, decode):
    """turns: of one trajectory (rollout.Turn); lines: of metrics.jsonl; decode(ids) -> text."""
    count = range(1, len(turns) + 1)
    values = {"V, before the response": [*zip(count, (turn.v for turn in turns))],
              "Q, after it": [*zip(count, (turn.q for turn in turns))]}
    curves = {name: [(n, line[key]) for n, line in enumerate(lines, 1)] for name, key in (
        ("success", "success"), ("V explains", "v_explained_variance"),
        ("Q explains", "q_explained_variance"))}
    end = "won" if turns[-1].won else "cut short" if turns[-1].truncated else "lost"
    body = [f"<h1>{escape(title)}, game {escape(str(turns[0].task))}: {end}</h1>",
            figure("V and Q of this episode", values, "turn"),
            figure("This run", curves, "iteration")]
    for turn in turns:
        numbers = {"V": turn.v, "Q": turn.q, "reward": turn.reward, "advantage": turn.advantage}
        heads = [f"<b>{name} {x:.2f}</b>" for name, x in numbers.items()]
        heads += ["<b>breaks the format</b>"] * turn.invalid
        heads += ["<b>not admissible</b>"] * (not turn.admissible)
        body.append(f"<section><h2>Turn {turn.turn + 1}</h2>{''.join(heads)}"
                    f"<details><summary>prompt</summary><pre>{escape(turn.prompt)}</pre></details>"
                    f"<p>{response(turn, decode)}</p></section>")
    return (f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
            f"{''.join(body)}</html>")
