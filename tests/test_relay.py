"""Two functions that take turns on two host threads."""

import contextvars
import gc
import os
import signal
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distca import ops
from distca.pingpong.relay import Relay


def new_relay() -> Relay:
    def stop(error: BaseException) -> None:
        raise AssertionError("nothing interrupts this test") from error

    return Relay(stop)


SETTING = contextvars.ContextVar("setting", default="none")


def run_both(relay: Relay, function) -> tuple:
    return relay.run(*(lambda name=name: function(name) for name in ("first", "second")))


def test_functions_take_turns():
    relay, log = new_relay(), []

    def attend(name: str, num_calls: int) -> str:
        for call in range(num_calls):
            log.append((name, call, relay.number, threading.active_count() > 1))
            relay.call()
            relay.hand_over()
        log.append((name, "end", relay.number, True))
        return name

    results = relay.run(lambda: attend("first", 3), lambda: attend("second", 1))
    assert results == ("first", "second")
    assert [each[:3] for each in log] == [
        *[("first", 0, 0), ("second", 0, 1), ("first", 1, 0), ("second", "end", 1)],
        *[("first", 2, 0), ("first", "end", 0)],
    ]


def test_the_second_runs_after_a_first_that_calls_nothing():
    log = []
    relay = new_relay()
    run_both(relay, log.append)
    assert log == ["first", "second"]


@pytest.mark.parametrize("who", ["first", "second"])
@pytest.mark.parametrize("calls_before", [0, 1])
def test_an_error_of_one_ends_the_other(who, calls_before):
    relay, ended = new_relay(), []

    def function(name: str) -> None:
        try:
            for call in range(3):
                if name == who and call == calls_before:
                    raise KeyError(name)
                relay.call()
                relay.hand_over()
            ended.append(f"{name} ran to its end")
        finally:
            ended.append(name)

    with pytest.raises(KeyError, match=who):
        run_both(relay, function)
    # The second has not begun if the first raises at once.
    assert sorted(ended) == ["first", "second"][: 1 if (who, calls_before) == ("first", 0) else 2]
    assert run_both(new_relay(), str.upper) == ("FIRST", "SECOND"), "the thread lives on"


@pytest.mark.parametrize("calls", [0, 1])
def test_ctrl_c_ends_both(request, calls):
    """It comes while the first waits for the second, after a call of attention or at the end."""
    # Processes that a shell has started in the background ignore Ctrl-C.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    stopped = threading.Event()
    relay = Relay(lambda error: stopped.set())

    def first() -> None:
        for _ in range(calls):
            relay.call()
            relay.hand_over()

    def second() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(30), "the second waits for other ranks"
        relay.call()
        relay.hand_over()

    with pytest.raises(KeyboardInterrupt):
        relay.run(first, second)
    assert run_both(new_relay(), str.upper) == ("FIRST", "SECOND"), "the thread lives on"


def top_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("who", ["first", "second", "both"])
def test_an_error_inside_a_checkpoint_leaves_no_hooks(who):
    """Its hooks end with its frames, on the thread that runs them. So no cycle may hold frames."""
    relay, hooks = new_relay(), []

    def attend(x: torch.Tensor, name: str) -> torch.Tensor:
        relay.call()
        relay.hand_over()
        if who in (name, "both"):
            raise KeyError(who)
        return x * x

    def function(name: str) -> torch.Tensor:
        return checkpoint(attend, torch.ones(1, requires_grad=True), name, use_reentrant=False)

    gc.disable()
    try:
        with pytest.raises(KeyError, match=who) as raised:
            run_both(relay, function)
        del raised
        hooks = top_hooks(), *run_both(new_relay(), lambda _: top_hooks())
    finally:
        gc.enable()
    assert hooks == (None, None, None)


def test_both_see_the_state_of_the_caller():
    def state(_: str) -> tuple:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            hooks is not None,
            len(torch.overrides._get_current_function_mode_stack()),
            SETTING.get(),
        )

    plain = run_both(new_relay(), state)
    assert plain == ((True, False, torch.bfloat16, True, False, 0, "none"),) * 2
    SETTING.set("mine")
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.autograd.graph.save_on_cpu(),
        torch.device("cpu"),
    ):
        inside = run_both(new_relay(), state)
    assert inside == ((False, True, torch.float16, False, True, 1, "mine"),) * 2
    SETTING.set("none")
    assert run_both(new_relay(), state) == plain, "nothing is left on the thread"


def test_the_backward_pass_takes_turns_too():
    order = []

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            order.append(ctx.name)
            return grad, None

    x = torch.ones(1, requires_grad=True)
    halves = x.expand(2).split(1)
    relay = new_relay()

    def block(idx: int) -> torch.Tensor:
        y = halves[idx]
        for call in range(2):
            y = Step.apply(y, f"before {idx}.{call}")
            relay.call()
            y = Step.apply(y, f"attention {idx}.{call}")
            relay.hand_over()
        return Step.apply(y, f"after {idx}")

    results = relay.run(lambda: block(0), lambda: block(1))
    Step.apply(torch.cat(results), "next block").sum().backward()
    assert order == [
        *["next block", "after 1", "attention 1.1", "after 0", "attention 0.1"],
        *["before 1.1", "attention 1.0", "before 0.1", "attention 0.0"],
        *["before 1.0", "before 0.0"],
    ]


def test_a_relay_in_the_backward_pass_knows_of_it():
    passes = []

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            passes.append(
                (ops.backward_pass(), *run_both(new_relay(), lambda _: ops.backward_pass()))
            )
            return grad

    Recomputed.apply(torch.ones(1, requires_grad=True)).backward()
    (outside, first, second) = passes[0]
    assert outside == first == second >= 0
    assert run_both(new_relay(), lambda _: ops.backward_pass()) == (-1, -1)
