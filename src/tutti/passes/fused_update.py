"""`fused_update`: joins fused updates of single parameters with the same numbers into one over all.

    %5 = adamw([%w], [%g], [%m], [%v], [], [%s], lr=%lr)        %9 = adamw([%w, %b], [%g, %h], ..., lr=%lr)
    %6 = item(%5, 0)                                       ->  %6 = item(%9, 0)
    %7 = adamw([%b], [%h], [%n], [%u], [], [%t], lr=%lr)       %8 = item(%9, 1)
    %8 = item(%7, 0)

So a step of many parameters is one call, as in PyTorch's own fused optimizers.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.graph.ops.fused_updates import BY_OP
from tutti.graph.ops.loop import loop

# The limit on bytes of gradients in a call joined over other work, since they wait for the last: an eighth of
# all, and at least this. Each call costs some 40 us beside its work.
GROUP_SHARE, GROUP_NBYTES = 8, 4 * 2**20

# Messages between pipeline ranks, whose programs differ: in another order two ranks wait for each other.
_MESSAGES = {collectives.send, collectives.receive, loop}


def fused_update(graph: fx.Graph) -> int:
    """Rewrite `graph`; returns the number of calls merged into others.

    It joins calls with the same kernel, numbers, dtype and device if none needs the result of another. The
    joint call takes the position of the last; users of a result move behind it, but no message between
    pipeline ranks behind another one.
    """
    count = 0
    left = [n for n in graph.nodes if n.target in BY_OP]
    most = max(GROUP_NBYTES, sum(map(_nbytes, left)) // GROUP_SHARE)
    while left:
        members, after = _independent(left[0], most)
        if len(members) > 1:
            _join(graph, members, after)
            count += len(members) - 1
        joined = set(members)
        left = [n for n in left if n not in joined]
    return count


def _key(node: fx.Node) -> Any:
    """The key that joined calls share."""
    if node.target not in BY_OP:
        return None
    lists: Any = node.args
    val = lists[0][0].meta["val"]
    given = tuple(bool(xs) for xs in lists)
    return node.target, given, val.dtype, val.device, tuple(sorted(node.kwargs.items(), key=str))


def _independent(first: fx.Node, most: int) -> tuple[list[fx.Node], set[fx.Node]]:
    """`first` and the later calls like it that need none of their results; and all nodes that need one.

    With other work between them, up to `most` bytes of gradients.
    """
    members, after, seen, key = [first], set(), {first}, _key(first)
    nbytes, apart, sends = _nbytes(first), False, False
    node = first.next
    while node.op != "root":
        if any(x in seen for x in node.all_input_nodes):
            after.add(node)
            seen.add(node)
            sends |= node.target in _MESSAGES
        elif sends and node.target in _MESSAGES:
            break
        elif _key(node) == key:
            if apart and nbytes + _nbytes(node) > most:
                break
            members.append(node)
            seen.add(node)
            nbytes, apart = nbytes + _nbytes(node), False
        else:
            apart |= node.meta.get("region") != "update"
        node = node.next
    return members, after


def _nbytes(update: fx.Node) -> int:
    """The bytes of the gradients that a call reads."""
    lists: Any = update.args
    return sum(x.meta["val"].nbytes for x in lists[1])


def _join(graph: fx.Graph, members: list[fx.Node], after: set[fx.Node]) -> None:
    last = members[-1]
    lists: list[Any] = [[x for m in members for x in m.args[k]] for k in range(len(last.args))]  # type: ignore[union-attr]
    with graph.inserting_after(last):
        joined = graph.call_function(last.target, tuple(lists), dict(last.kwargs))  # type: ignore[arg-type]
    joined.meta = {k: members[0].meta[k] for k in NOTES if k in members[0].meta}
    _move_behind(joined, members[0], after)
    values: dict[int, Any] = {}
    start = 0
    for member in members:
        size = len(member.args[0])  # type: ignore[arg-type]
        positions = [
            _position(i, size, start, len(lists[0])) for i in range(len(member.meta["val"]))
        ]
        values |= dict(zip(positions, member.meta["val"], strict=True))
        for user in list(member.users):
            assert user.target is operator.getitem, user
            user.args = (joined, positions[user.args[1]])  # type: ignore[index]
        graph.erase_node(member)
        start += size
    joined.meta["val"] = [values[i] for i in range(len(values))]


def _position(index: int, size: int, start: int, total: int) -> int:
    """The position of result `index` of a call over `size` parameters among those of one over `total`."""
    which, i = divmod(index, size)
    return which * total + start + i


def _move_behind(joined: fx.Node, first: fx.Node, after: set[fx.Node]) -> None:
    """Move users of a result that precede `joined` right behind it, in their order."""
    moved, node = [], first
    while node is not joined:
        if node in after:
            moved.append(node)
        node = node.next
    for node in reversed(moved):
        joined.append(node)
