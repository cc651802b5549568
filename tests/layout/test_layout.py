"""The layout line: every word, what is refused and with what advice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.layout.layout import AXES, PRECISIONS, SCHEDULES, ZERO_AXES


def error(text: str) -> str:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    return str(caught.value)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    chosen = draw(st.lists(st.sampled_from(AXES), unique=True))
    axes = {a: draw(st.integers(1, 8)) for a in AXES if a in chosen}
    zero = draw(st.integers(0, 3)) if max(axes.get(a, 1) for a in ZERO_AXES) > 1 else 0
    return Layout(
        axes=axes,
        zero=zero,
        micro=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["", *SCHEDULES])),
        server=draw(st.integers(0, 2)),
        sync=draw(st.sampled_from(["", "average(every=4)", "diloco(h=8, lr=0.7)"])),
        precision=draw(st.sampled_from(PRECISIONS)),
        remat=draw(st.sampled_from(["none", "full", "8GB"])),
    )


@given(layouts())
def test_text_parses_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


@given(layouts(), st.randoms())
def test_words_stand_in_any_order(layout: Layout, random) -> None:
    words = [w for w in str(layout).split(" ") if "(" not in w and ")" not in w]
    random.shuffle(words)
    text = " ".join(words)
    assert str(Layout.parse(text)) == " ".join(w for w in str(layout).split(" ") if w in words)


def test_every_word() -> None:
    text = "replica=2 pipe=2 data=2 expert=2 seq=2 tensor=2 zero=3 micro=4 schedule=zb sync=average"
    layout = Layout.parse(f"{text} server=1 precision=bf16 remat=full")
    assert layout.num_ranks == 64 and layout.zero == 3 and layout.micro == 4
    assert (layout.schedule, layout.sync, layout.server) == ("zb", "average", 1)
    assert (layout.precision, layout.remat) == ("bf16", "full")


@pytest.mark.parametrize("nothing", [None, "", "  "])
def test_no_words_mean_one_device(nothing: str | None) -> None:
    layout = Layout.parse(nothing)
    assert layout.num_ranks == 1 and str(layout) == "" and layout.mesh.axes == ()


def test_float32_is_the_precision_that_need_not_be_said() -> None:
    assert Layout.parse("data=2 precision=fp32") == Layout.parse("data=2")
    assert str(Layout.parse("precision=fp32 data=2")) == "data=2"


def test_a_layout_is_itself() -> None:
    layout = Layout.parse("data=2")
    assert Layout.parse(layout) is layout


@pytest.mark.parametrize("given", [3, True, {"data": 2}, ["data=2"], b"data=2"])
def test_what_is_no_text(given: Any) -> None:
    message = error(given)
    assert "is of type" in message and "not a text" in message and "fix" in message


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(axes={"data": 1}, zero=7), "not a level of ZeRO"),
        (Layout(micro=0), "micro=0"),
        (Layout(axes={"foo": 2}), 'unknown word "foo=2"'),
        (Layout(axes={"data": -2}), "data=-2"),
        (Layout(axes={"data": 2.0}), "data=2.0"),  # type: ignore[dict-item]
        (Layout(axes=None), "axes=None is of type NoneType"),  # type: ignore[arg-type]
        (Layout(sync=None), "sync=None is of type NoneType"),  # type: ignore[arg-type]
    ],
)
def test_a_layout_of_wrong_fields_is_refused(layout: Layout, said: str) -> None:
    assert said in error(layout)  # type: ignore[arg-type]


def test_the_axes_of_a_layout_stand_outermost_first() -> None:
    assert str(Layout.parse(Layout(axes={"tensor": 2, "data": 4}))) == "data=4 tensor=2"


def test_a_word_that_there_is_not_cannot_be_left_out() -> None:
    with pytest.raises(LayoutError, match="'foo' is no word"):
        Layout.parse("data=2").without("foo")
    assert str(Layout.parse("data=2 zero=1").without("zero").without("tensor")) == "data=2"


def test_the_layout_of_one_device_is_named() -> None:
    with pytest.raises(LayoutError, match='start 2 ranks, or "", the layout of one device'):
        Layout.parse("data=2").check_ranks(1)


def test_axes_stand_outermost_first_and_size_one_is_left_out_of_the_mesh() -> None:
    layout = Layout.parse("tensor=2 seq=1 data=4")
    assert str(layout) == "data=4 seq=1 tensor=2"
    assert str(layout.mesh) == "data=4 tensor=2"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("auto", '"auto" in layout "auto": a layout must be chosen', "tutti plan"),
        ("dat=2", 'unknown word "dat=2"', "did you mean data"),
        ("tensr=2", 'unknown word "tensr=2"', "did you mean tensor"),
        ("pipeline=2", "unknown word", "did you mean pipe"),
        ("shedule=zb", "unknown word", "did you mean schedule"),
        ("qqqq=2", "unknown word", "axis=size words"),
        ("dp=2", 'unknown word "dp=2"', "did you mean data=2?"),
        ("data=2 fsdp=4", 'unknown word "fsdp=4"', "did you mean data=4 zero=3?"),
        ("tp=4", "unknown word", "did you mean tensor=4?"),
        ("cp", "unknown word", "did you mean seq=2?"),
        ("ep=2", "unknown word", "did you mean expert=2?"),
        ("DATA=4", "unknown word", "did you mean data=4?"),
        ("data=2,tensor=2", 'a "," between words', '"data=2 tensor=2"'),
        ("data=2; zero=3;", 'a ";" between words', '"data=2 zero=3"'),
        (
            "replica=2, sync=average(every=2, then=4),data=2",
            'a "," between words',
            '"replica=2 sync=average(every=2, then=4) data=2"',
        ),
        ("data = 2", 'a space beside "="', '"data=2"'),
        (
            "replica=2 sync = average(every=2)",
            'a space beside "="',
            '"replica=2 sync=average(every=2)"',
        ),
        ("replica=2 sync=average(every=2", 'a "(" in layout', '"replica=2 sync=average(every=2)"'),
        ("replica=2 sync", "has no value", "sync=average(every=16)"),
        ("data", 'in layout "data"', "data=2"),
        ("data=", "not a whole number from 1", "data=2"),
        ("data=0", "not a whole number from 1", "data=2"),
        ("data=two", "not a whole number from 1", "data=2"),
        ("data=2 data=4", '"data" appears twice', "keep one of them"),
        ("zero=1 data=2 zero=2", '"zero" appears twice', "keep one of them"),
        ("data=2 zero=4", "not a level of ZeRO", "zero=0, 1, 2 or 3"),
        ("zero=1", "lacks", "data=2 zero=1"),
        ("tensor=2 zero=1", "lacks", "data=2 tensor=2 zero=1"),
        ("micro=0", "not a whole number from 1", "micro=2"),
        ("schedule=fast", 'schedule="fast" is unknown', "1f1b, interleaved(2), ./mine.txt"),
        ("schedule", "has no value", "schedule="),
        ("precision=fp16", 'precision="fp16" is unknown', "the script's own torch.autocast"),
        ("precision=bf61", 'precision="bf61" is unknown', "fp32, bf16"),
        ("precision=", 'in layout "precision="', "precision=bf16"),
    ],
)
def test_what_is_refused_and_the_advice(text: str, what: str, fix: str) -> None:
    message = error(text)
    assert what in message
    assert fix in message.partition("  fix ")[2]


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("server=1", "keeps the weights of workers", '"replica=2 sync=step server=1"'),
        (
            "data=2 server=2",
            "keeps the weights of workers",
            '"replica=2 data=2 sync=step server=2"',
        ),
        ("replica=3 server=1", "does not say how its workers agree", "sync=async"),
        (
            "replica=2 sync=average server=1",
            "agree through servers",
            '"replica=2 sync=step server=1"',
        ),
        ("replica=2 sync=step", "which layout", '"replica=2 sync=step server=1", or data=2'),
        ("sync=bounded(3)", "which layout", '"replica=2 sync=bounded(3) server=1"'),
        (
            "replica=2 data=2 zero=1 sync=async server=1",
            '"zero"',
            '"replica=2 data=2 sync=async server=1"',
        ),
        (
            "replica=2 pipe=2 tensor=2 micro=2 sync=step server=1",
            '"pipe"',
            '"replica=2 tensor=2 micro=2 sync=step server=1"',
        ),
        ("replica=2", "how its replicas agree", "sync=average"),
    ],
)
def test_servers_and_replicas_that_do_not_go_together(text: str, what: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text).check_available()
    assert what in str(caught.value)
    assert fix in str(caught.value).partition("  fix ")[2]


@pytest.mark.parametrize("sync", ["step", "async", "bounded(2)"])
def test_servers_are_ranks_beside_the_workers(sync: str) -> None:
    layout = Layout.parse(f"replica=3 server=2 sync={sync} micro=2 precision=bf16")
    layout.check_available()
    layout.check_ranks(5)
    with pytest.raises(LayoutError, match="3 and 2 are servers") as caught:
        layout.check_ranks(4)
    assert f'or "replica=2 micro=2 sync={sync} server=2 precision=bf16"' in str(caught.value)


def test_workers_of_several_ranks() -> None:
    layout = Layout.parse("replica=3 data=2 tensor=2 micro=2 server=1 sync=step precision=bf16")
    layout.check_available()
    layout.check_ranks(13)
    assert layout.worker_size == 4
    assert layout.of_one == Layout.parse("data=2 tensor=2 micro=2 precision=bf16")
    with pytest.raises(LayoutError, match='or "replica=2 data=2 tensor=2 micro=2 sync=step'):
        layout.check_ranks(9)
    with pytest.raises(LayoutError, match='or "data=10"'):
        layout.check_ranks(10)


@pytest.mark.parametrize(
    "text", ["", "data=2", "data=2 tensor=2 seq=2 expert=2 zero=3", "pipe=1", "precision=bf16"]
)
def test_what_this_version_runs_is_available(text: str) -> None:
    Layout.parse(text).check_available()


@pytest.mark.parametrize(
    ("text", "ranks", "nearest"),
    [
        ("data=2 tensor=2", 8, "data=4 tensor=2"),
        ("data=2 tensor=4", 4, "tensor=4"),
        ("data=2 tensor=3 zero=1", 4, "data=4 zero=1"),
        ("data=4 zero=1", 1, ""),
        ("tensor=2", 6, "data=3 tensor=2"),
        ("data=2 seq=2 tensor=3", 6, "seq=2 tensor=3"),
        ("data=2 seq=2 zero=3", 2, "seq=2 zero=3"),
    ],
)
def test_a_wrong_number_of_ranks_and_the_nearest_layout(
    text: str, ranks: int, nearest: str
) -> None:
    layout = Layout.parse(text)
    with pytest.raises(LayoutError) as caught:
        layout.check_ranks(ranks)
    assert f"{ranks} were started" in str(caught.value)
    assert f'or "{nearest}"' in str(caught.value)
    assert Layout.parse(nearest).num_ranks == ranks
    Layout.parse(nearest).check_ranks(ranks)


def test_the_nearest_layout_with_servers_leaves_out_what_does_not_go_with_them() -> None:
    layout = Layout(axes={"pipe": 2}, server=1)
    assert str(layout._fitted(5)) == "replica=4 sync=step server=1"


@given(layouts(), st.integers(1, 16))
def test_the_nearest_layout_always_works(layout: Layout, ranks: int) -> None:
    fitted = layout._fitted(ranks)
    fitted.check_ranks(ranks)
    assert Layout.parse(str(fitted)) == fitted
