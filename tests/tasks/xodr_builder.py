"""Small OpenDRIVE maps for tests, written as the tools write them."""

LINE = "<line/>"


def cubic(tag, at, a, b=0.0, c=0.0, d=0.0, *, position="sOffset"):
    return f'<{tag} {position}="{at!r}" a="{a!r}" b="{b!r}" c="{c!r}" d="{d!r}"/>'


def lane(lane_id, *content, width=3.0, type="driving", before=None, after=None):
    """Return a lane of constant width, or of ``content`` where ``width`` is None."""
    links = "".join(
        f'<{tag} id="{target}"/>'
        for tag, target in (("predecessor", before), ("successor", after))
        if target is not None
    )
    body = "".join(content) + (cubic("width", 0.0, width) if width is not None else "")
    return lane_id, f'<lane id="{lane_id}" type="{type}" level="false"><link>{links}</link>{body}</lane>'


def section(*lanes, s=0.0):
    left = "".join(text for lane_id, text in lanes if lane_id > 0)
    right = "".join(text for lane_id, text in lanes if lane_id < 0)
    return (
        f'<laneSection s="{s!r}"><left>{left}</left><center><lane id="0" type="none" level="false"/></center>'
        f"<right>{right}</right></laneSection>"
    )


def piece(shape=LINE, *, s=0.0, x=0.0, y=0.0, heading=0.0, length=10.0):
    return f'<geometry s="{s!r}" x="{x!r}" y="{y!r}" hdg="{heading!r}" length="{length!r}">{shape}</geometry>'


def road(road_id, *sections, length=10.0, junction=-1, plan="", links="", extra="", offset="", rule="", signals=""):
    """Return a road; ``plan`` is a straight line from the origin by default."""
    plan = plan or piece(length=length)
    rule = f' rule="{rule}"' if rule else ""
    return (
        f'<road name="" length="{length!r}" id="{road_id}" junction="{junction}"{rule}><link>{links}</link>'
        f"{extra}<planView>{plan}</planView><lanes>{offset}{''.join(sections)}</lanes><signals>{signals}</signals></road>"
    )


def link(tag, target, contact="start", *, kind="road"):
    at = f' contactPoint="{contact}"' if kind == "road" else ""
    return f'<{tag} elementType="{kind}" elementId="{target}"{at}/>'


def junction(junction_id, *connections):
    """Return a junction of connections (incoming road, connecting road, [(from lane, to lane), ...])."""
    rows = []
    for index, (incoming, connecting, pairs) in enumerate(connections):
        links = "".join(f'<laneLink from="{a}" to="{b}"/>' for a, b in pairs)
        rows.append(
            f'<connection id="{index}" incomingRoad="{incoming}" connectingRoad="{connecting}" contactPoint="start">{links}</connection>'
        )
    return f'<junction id="{junction_id}" name="">{"".join(rows)}</junction>'


def town(*parts):
    """Return a whole map."""
    return ('<?xml version="1.0" encoding="UTF-8"?>\n<OpenDRIVE>' + "".join(parts) + "</OpenDRIVE>").encode()
