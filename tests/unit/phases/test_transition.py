"""The planner: exact cases first, then properties over every ledger; and the ledger itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.config import Offload
from colo.errors import BudgetError, PhaseError
from colo.phases.phase import EDGES, MOVES, NEEDS, Need, Phase, Residency, check_edge, check_move
from colo.phases.transition import Action, Holding, Ledger, Step, plan_transition

R, O, D, S = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED, Residency.SHARED  # noqa: E741
AWAY = {
    "engine.weights": None,
    "engine.kv_cache": D,
    "trainer.parameters": None,
    "trainer.gradients": O,
    "trainer.optimizer": O,
    "trainer.master_weights": O,
    "trainer.resident_state": O,
}


def book(capacity_bytes=100, host_capacity_bytes=1000, **rows):
    """A ledger from `kv_cache=(40, R)` and the like."""
    full = {name.rsplit(".", 1)[1]: name for name in AWAY if name != "engine.weights"} | {"weights": "engine.weights"}
    holdings = [
        Holding(name=full[key], size_bytes=size, residency=residency, away=AWAY[full[key]])
        for key, (size, residency) in rows.items()
    ]
    return Ledger.of(holdings, capacity_bytes=capacity_bytes, host_capacity_bytes=host_capacity_bytes)


def steps_of(transition):
    return [(step.action.value, step.segment) for step in transition.steps]


def test_what_fits_stays():
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, book(weights=(20, R), kv_cache=(30, R), optimizer=(50, R)))
    assert plan.steps == ()


@pytest.mark.parametrize("offload", [Offload.AUTO, Offload.NEVER])
def test_a_kv_cache_that_fits_leaves_for_training_where_it_shall_and_nothing_else_does(offload):
    ledger = book(weights=(20, R), kv_cache=(30, R), optimizer=(50, R))
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, ledger, offload=offload, drop_cache=True)
    assert steps_of(plan) == [("discard", "engine.kv_cache")]
    assert plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger, offload=offload, drop_cache=True).steps == ()
    # and counts for what has to leave: nothing more does
    tight = book(weights=(20, R), kv_cache=(30, R), optimizer=(50, R), gradients=(30, D))
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, tight, offload=offload, drop_cache=True)
    assert {name for _, name in steps_of(plan)} <= {"engine.kv_cache", "trainer.gradients"}


def test_kv_cache_goes_before_anything_that_costs_a_copy():
    ledger = book(weights=(20, R), kv_cache=(40, R), optimizer=(50, O), gradients=(10, D))
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, ledger)
    assert steps_of(plan) == [("discard", "engine.kv_cache")]


def test_the_kv_cache_comes_last_and_only_as_much_leaves_as_must():
    ledger = book(weights=(20, R), kv_cache=(40, D), optimizer=(30, R), master_weights=(25, R))
    plan = plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger)
    assert steps_of(plan) == [("offload", "trainer.master_weights"), ("allocate", "engine.kv_cache")]
    assert plan.peak_bytes <= 100


def test_an_eviction_that_a_larger_one_makes_unnecessary_is_taken_back():
    ledger = book(weights=(10, R), kv_cache=(50, D), master_weights=(20, R), optimizer=(60, R))
    plan = plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger)
    assert steps_of(plan) == [("offload", "trainer.optimizer"), ("allocate", "engine.kv_cache")]


def test_state_that_stays_leaves_last_since_it_does_so_for_good():
    ledger = book(weights=(20, R), kv_cache=(30, D), gradients=(35, R), resident_state=(30, R))
    assert steps_of(plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger))[0] == ("offload", "trainer.gradients")
    for resident_state, leaving in ((10, {"optimizer"}), (40, {"optimizer", "resident_state"})):
        ledger = book(weights=(20, R), kv_cache=(70, D), optimizer=(40, R), resident_state=(resident_state, R))
        offloads = {name for action, name in steps_of(plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger))[:-1]}
        assert offloads == {f"trainer.{name}" for name in leaving}


def test_always_offloads_what_would_fit():
    ledger = book(weights=(20, R), kv_cache=(10, D), optimizer=(30, R))
    plan = plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger, offload=Offload.ALWAYS)
    assert steps_of(plan) == [("offload", "trainer.optimizer"), ("allocate", "engine.kv_cache")]


def test_never_drops_caches_but_copies_nothing():
    ledger = book(weights=(20, R), kv_cache=(50, D), optimizer=(60, R))
    with pytest.raises(BudgetError, match="phase rollout needs 50 B"):
        plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger, offload=Offload.NEVER)
    ledger = book(weights=(20, R), kv_cache=(50, R), optimizer=(60, D))
    assert steps_of(plan_transition(Phase.IDLE, Phase.TRAIN, ledger, offload=Offload.NEVER)) == [
        ("discard", "engine.kv_cache")
    ]


def test_late_segments_stay_away_until_they_are_asked_for():
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, book(weights=(20, R), optimizer=(60, O)))
    assert plan.steps == ()
    assert plan.promised_bytes == 80


def test_working_memory_and_late_segments_take_turns_where_both_do_not_fit():
    ledger = book(weights=(20, R), optimizer=(50, R))
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, ledger, working_bytes=70)
    assert steps_of(plan) == [("offload", "trainer.optimizer")]
    assert plan.promised_bytes == 90


def test_a_late_segment_that_could_never_come_back_is_refused_at_the_door():
    with pytest.raises(BudgetError) as caught:
        plan_transition(Phase.IDLE, Phase.TRAIN, book(weights=(20, R), optimizer=(90, O)))
    assert caught.value.needed_bytes == 90
    assert caught.value.free_bytes == 80
    assert "trainer.optimizer" in str(caught.value)


def test_working_memory_that_cannot_fit_is_refused():
    with pytest.raises(BudgetError, match="phase train needs 81 B"):
        plan_transition(Phase.IDLE, Phase.TRAIN, book(weights=(20, R)), working_bytes=81)


def test_a_capacity_smaller_than_what_stays_is_said_in_whole_numbers():
    with pytest.raises(BudgetError, match="phase sync, with what stays, needs 120 B, but 100 B could be made free"):
        plan_transition(Phase.IDLE, Phase.SYNC, book(weights=(120, R)))


def test_host_memory_is_admitted_too():
    ledger = book(host_capacity_bytes=50, weights=(20, R), kv_cache=(40, D), optimizer=(60, R))
    with pytest.raises(BudgetError, match="host arena in phase rollout needs 60 B") as caught:
        plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger)
    assert caught.value.free_bytes == 50


def test_shared_bytes_count_once_and_never_move():
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, book(weights=(90, R), parameters=(90, S)))
    assert plan.steps == ()
    assert plan.after.device_bytes == 90


def test_what_is_refused_names_what_cannot_leave_and_nothing_else():
    ledger = book(weights=(60, R), kv_cache=(70, D), optimizer=(10, R), gradients=(5, O))
    with pytest.raises(BudgetError, match=r"raise device_limit_bytes\. engine\.weights cannot leave\.\n"):
        plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger)
    with pytest.raises(BudgetError, match=r"raise device_limit_bytes\.\n"):
        plan_transition(Phase.IDLE, Phase.ROLLOUT, book(kv_cache=(170, D), optimizer=(10, R), parameters=(5, S)))


def test_a_full_device_is_told_by_what_the_phase_needs():
    with pytest.raises(BudgetError, match="phase rollout needs 10 B, but 0 B could be made free"):
        plan_transition(Phase.IDLE, Phase.ROLLOUT, book(weights=(100, R), kv_cache=(10, D)))


def test_working_memory_makes_unused_segments_leave():
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, book(weights=(20, R), kv_cache=(40, R)), working_bytes=50)
    assert steps_of(plan) == [("discard", "engine.kv_cache")]
    assert (plan.side_by_side, plan.promised_bytes, plan.moved_bytes) == (True, 70, 0)


@pytest.mark.parametrize(("working_bytes", "side_by_side", "promised_bytes"), [(30, True, 100), (31, False, 70)])
def test_what_fits_to_the_last_byte_is_side_by_side(working_bytes, side_by_side, promised_bytes):
    ledger = book(weights=(20, R), optimizer=(50, O))
    plan = plan_transition(Phase.IDLE, Phase.TRAIN, ledger, working_bytes=working_bytes)
    assert (plan.side_by_side, plan.promised_bytes, plan.steps) == (side_by_side, promised_bytes, ())


@pytest.mark.parametrize(
    ("sizes", "needed_bytes", "leaving"),
    [
        ((30, 30, 30), 60, "gradients master_weights"),  # the first two of equal ones, by name
        ((10, 20, 40), 45, "gradients optimizer"),  # of the small ones the larger is spared
        ((10, 12, 40), 42, "gradients optimizer"),  # and not both
        ((20, 0, 60), 60, "optimizer"),  # to the byte
        ((20, 30, 60), 20, "gradients"),
        ((0, 0, 0), 0, ""),
    ],
)
def test_the_fewest_bytes_that_are_enough_leave(sizes, needed_bytes, leaving):
    gradients, masters, optimizer = sizes
    ledger = book(
        capacity_bytes=sum(sizes),
        gradients=(gradients, R),
        master_weights=(masters, R),
        optimizer=(optimizer, R),
        kv_cache=(needed_bytes, D),
    )
    plan = plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger)
    names = [step.segment.removeprefix("trainer.") for step in plan.steps if step.action is Action.OFFLOAD]
    assert sorted(names) == leaving.split()
    assert plan.moved_bytes == sum(step.size_bytes for step in plan.steps if step.action is Action.OFFLOAD)


@pytest.mark.parametrize(
    ("source", "target", "action", "resource", "delta", "moved"),
    [
        (R, D, "discard", "device", -7, 0),
        (O, D, "discard", "device", 0, 0),
        (R, O, "offload", "d2h", -7, 7),
        (O, R, "onload", "h2d", 7, 7),
        (D, R, "allocate", "device", 7, 0),
    ],
)
def test_a_step_knows_what_it_does_and_costs(source, target, action, resource, delta, moved):
    step = Step(segment="s", source=source, target=target, size_bytes=7)
    assert (step.action, step.resource, step.device_delta_bytes, step.moved_bytes) == (action, resource, delta, moved)
    assert str(step) == f"{action} s (7 B)"


def test_what_may_follow_is_listed_in_order():
    with pytest.raises(PhaseError, match="from idle the runtime may enter rollout, sync, train$"):
        check_edge(Phase.IDLE, Phase.IDLE)
    with pytest.raises(PhaseError, match="cannot become resident; it may become discarded, offloaded$"):
        check_move("x", R, R)
    with pytest.raises(PhaseError, match="it may become nothing: it is someone else's memory$"):
        check_move("x", S, R)


@pytest.mark.parametrize("source", Phase)
@pytest.mark.parametrize("target", Phase)
def test_every_edge_is_legal_or_refused(source, target):
    if target in EDGES[source]:
        assert plan_transition(source, target, book()).target is target
    else:
        with pytest.raises(PhaseError, match=f"cannot go from phase {source} to {target}"):
            check_edge(source, target)
        with pytest.raises(PhaseError, match=f"cannot go from phase {source} to {target}"):
            plan_transition(source, target, book())


@pytest.mark.parametrize("source", Residency)
@pytest.mark.parametrize("target", Residency)
def test_every_move_is_legal_or_refused(source, target):
    if target in MOVES[source]:
        check_move("x", source, target)
        assert source is not target
    else:
        with pytest.raises(PhaseError, match=f"segment x is {source} and cannot become {target}"):
            check_move("x", source, target)


@st.composite
def ledgers(draw):
    rows = []
    for name, away in AWAY.items():
        if draw(st.booleans()):
            legal = [R, D] if away is not O else [R, O, D]
            size = draw(st.integers(0, 60))
            rows.append(Holding(name=name, size_bytes=size, residency=draw(st.sampled_from(legal)), away=away))
    held = sum(row.device_bytes for row in rows)
    capacity = held + draw(st.integers(0, 80))
    return Ledger.of(rows, capacity_bytes=capacity, host_capacity_bytes=draw(st.integers(0, 200)))


@settings(max_examples=400)
@given(
    ledger=ledgers(),
    target=st.sampled_from([Phase.SYNC, Phase.ROLLOUT, Phase.TRAIN]),
    working_bytes=st.integers(0, 80),
    offload=st.sampled_from(Offload),
    drop_cache=st.booleans(),
)
def test_an_admitted_plan_gives_the_phase_what_it_needs_within_the_capacity(
    ledger, target, working_bytes, offload, drop_cache
):
    asked = {"working_bytes": working_bytes, "offload": offload, "drop_cache": drop_cache}
    try:
        plan = plan_transition(Phase.IDLE, target, ledger, **asked)
    except BudgetError as error:
        assert error.needed_bytes > error.free_bytes
        return
    for name, need in NEEDS[target].items():
        if need is Need.RESIDENT and name in plan.after.holdings:
            assert plan.after.holdings[name].residency in (R, S)
    order = [list(Action).index(step.action) for step in plan.steps]
    assert order == sorted(order)
    running = ledger
    for step in plan.steps:
        running = running.moved(step.segment, step.target)
        assert running.device_bytes <= plan.peak_bytes <= ledger.capacity_bytes
    assert running == plan.after
    assert plan.after.device_bytes + working_bytes <= plan.promised_bytes <= ledger.capacity_bytes
    assert plan.after.host_bytes <= ledger.host_capacity_bytes
    if offload is Offload.NEVER:
        assert all(step.action is not Action.OFFLOAD for step in plan.steps)


@settings(max_examples=300)
@given(
    ledger=ledgers(),
    target=st.sampled_from([Phase.ROLLOUT, Phase.TRAIN]),
    working_bytes=st.integers(0, 80),
    drop_cache=st.booleans(),
)
def test_auto_moves_nothing_out_that_could_have_stayed(ledger, target, working_bytes, drop_cache):
    try:
        plan = plan_transition(Phase.IDLE, target, ledger, working_bytes=working_bytes, drop_cache=drop_cache)
    except BudgetError:
        return
    for step in plan.steps:
        if step.action is Action.OFFLOAD:
            room_bytes = ledger.capacity_bytes - plan.promised_bytes
            assert step.size_bytes == 0 or room_bytes < step.size_bytes


def holding(name="a", size_bytes=10, residency=Residency.RESIDENT, away=Residency.OFFLOADED):
    return Holding(name=name, size_bytes=size_bytes, residency=residency, away=away)


def ledger(*holdings, capacity_bytes=100, host_capacity_bytes=100):
    return Ledger.of(holdings, capacity_bytes=capacity_bytes, host_capacity_bytes=host_capacity_bytes)


def test_only_resident_segments_hold_device_bytes():
    book = ledger(*(holding(r.value, 10, r) for r in Residency))
    assert (book.device_bytes, book.host_bytes, book.free_bytes) == (10, 10, 90)


def test_moving_a_segment_leaves_the_old_ledger_alone():
    before = ledger(holding())
    after = before.moved("a", Residency.OFFLOADED)
    assert (before.device_bytes, after.device_bytes, after.host_bytes) == (10, 0, 10)


def test_moving_refuses_an_illegal_move_and_says_which():
    with pytest.raises(PhaseError, match=r"a is shared and cannot become offloaded"):
        ledger(holding(residency=Residency.SHARED)).moved("a", Residency.OFFLOADED)


def test_names_are_unique():
    with pytest.raises(ValueError, match="two segments are called a"):
        ledger(holding(), holding())


def test_holdings_cannot_be_changed_behind_the_ledgers_back():
    with pytest.raises(TypeError):
        ledger(holding()).holdings["b"] = holding("b")


def test_a_refusal_carries_its_numbers_and_shows_who_holds_what():
    error = ledger(holding("big", 80)).refuse("phase train", needed_bytes=50, advice="Free something.")
    assert (error.needed_bytes, error.free_bytes, error.missing_bytes) == (50, 20, 30)
    for part in ("phase train needs 50 B", "20 B could be made free", "30 B are missing", "Free something.", "big"):
        assert part in str(error)


def test_only_an_offload_costs_bus_bytes():
    assert holding(away=Residency.OFFLOADED).eviction_cost_bytes == 10
    assert holding(away=Residency.DISCARDED).eviction_cost_bytes == 0


def test_the_ledger_as_text_lists_the_largest_first_in_columns_and_what_is_free():
    book = ledger(holding("small", 10), holding("a.long.name", 50, Residency.OFFLOADED), capacity_bytes=90)
    assert book.render().splitlines() == [
        "ledger of the device:",
        "  a.long.name         50 B  offloaded",
        "  small               10 B  resident",
        "  free                80 B",
        "  capacity            90 B",
        "  host arena: 50 B of 100 B",
    ]
