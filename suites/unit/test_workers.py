"""The CPU's pool of workers: every task once, errors to the caller, late helpers hold nothing up, an idle pool sleeps."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import alpha.backends.cpu.workers as workers_module
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Cpu
from alpha.backends.cpu.workers import SPIN_NS, Workers
from alpha.gates.contracts.reference import kernels, program


@pytest.fixture(params=(1, 2, 3, 5))
def pool(request):
    workers = Workers(request.param)
    yield workers
    workers.close()


def test_every_task_runs_once(pool):
    for count in (0, 1, 2, pool.n, 3 * pool.n + 1):
        for _ in range(50):
            ran: list[int] = []
            pool.run([partial(ran.append, i) for i in range(count)])
            assert sorted(ran) == list(range(count))


def test_tasks_of_different_lengths_are_all_over_on_return(pool):
    for late in range(2 * pool.n):
        ended = [False] * (2 * pool.n)

        def task(i: int, ended: list[bool] = ended, late: int = late) -> None:
            time.sleep(0.002 if i == late else 0)  # longer than the wait awake
            ended[i] = True

        pool.run([lambda i=i: task(i) for i in range(2 * pool.n)])
        assert all(ended)


def test_first_error_reaches_the_caller_and_the_pool_lives_on(pool):
    def broken() -> None:
        raise ValueError("task")

    for _ in range(20):
        with pytest.raises(ValueError, match="task"):
            pool.run([broken] * (pool.n + 1))
        ran: list[int] = []
        pool.run([partial(ran.append, 0)] * pool.n)
        assert len(ran) == pool.n


def test_helpers_take_part_when_the_caller_is_busy():
    workers, names = Workers(2), set()
    both = threading.Barrier(2, timeout=60)

    def meet() -> None:
        both.wait()
        names.add(threading.current_thread().name)

    workers.run([meet, meet])
    workers.close()
    assert len(names) == 2


def test_a_helper_that_starts_late_takes_part_in_the_first_round(monkeypatch):
    class Late(workers_module._Idle):
        def __init__(self) -> None:
            super().__init__()
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.1)  # the helper's first step; the first round begins meanwhile

    monkeypatch.setattr(workers_module, "_Idle", Late)
    test_helpers_take_part_when_the_caller_is_busy()


def test_an_idle_pool_uses_no_processor():
    workers = Workers(3)
    workers.run([lambda: None] * 3)
    time.sleep(0.05 + 5e-9 * SPIN_NS)
    before = time.process_time()
    time.sleep(0.3)
    used = time.process_time() - before
    workers.close()
    assert used < 0.05


def test_close_ends_the_threads():
    before = set(threading.enumerate())  # threads of other tests may end meanwhile, so counts would not do
    workers = Workers(4)
    workers.run([lambda: None] * 4)
    assert len(set(threading.enumerate()) - before) == 3
    workers.close()
    assert not set(threading.enumerate()) - before


def test_items_after_an_error_start_afresh(pool):
    cpu, seen, fail = Cpu(pool), [], [True]

    def body(i: int, worker: int) -> None:
        if fail[0]:
            raise RuntimeError("body")
        seen.append(i)

    run = cpu.items(7, body)
    with pytest.raises(RuntimeError, match="body"):
        run()
    fail[0] = False
    run()
    assert sorted(seen) == list(range(7))


def test_worker_numbers_are_never_shared_at_one_time(pool):
    cpu, busy = Cpu(pool), [threading.Lock() for _ in range(pool.n)]

    def body(i: int, worker: int) -> None:
        assert busy[worker].acquire(blocking=False)
        time.sleep(0.0002)
        busy[worker].release()

    for _ in range(10):
        cpu.items(4 * pool.n, body)()


def test_an_executor_gives_blas_its_threads_back():
    def threads() -> set[int]:
        return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}

    with threadpool_limits(limits=2, user_api="blas"):
        before = threads()
        with CpuExecutor(program("gpt"), kernels()):
            assert threads() == {1}
        assert threads() == before == {2}
