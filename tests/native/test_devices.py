"""How many threads a machine is worth."""

import threading

from processes import PATIENCE_S

from edgeinfer.native import devices


def test_hyper_threads_count_once_and_a_quota_limits(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(devices, "_CPU_DIRECTORY", tmp_path)
    monkeypatch.setattr(devices, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(devices, "_allowed_cpus", lambda: {0, 1, 2, 3})
    assert devices.default_threads() == 2
    monkeypatch.setattr(devices, "_allowed_cpus", lambda: {0, 2})
    assert devices.default_threads() == 1
    monkeypatch.setattr(devices, "_allowed_cpus", lambda: {0, 1, 2, 3})
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert devices.default_threads() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert devices.default_threads() == 2


def test_a_machine_that_tells_nothing_has_a_core_per_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_CPU_DIRECTORY", tmp_path)
    monkeypatch.setattr(devices, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(devices, "_allowed_cpus", lambda: {0, 1, 2})
    assert devices.default_threads() == 3


def test_cores_are_shared_only_if_every_look_finds_somebody_else(tmp_path, monkeypatch):
    loadavg = tmp_path / "loadavg"
    monkeypatch.setattr(devices, "_LOADAVG", loadavg)
    monkeypatch.setattr(devices, "_own_running_threads", lambda: 1)
    assert not devices.cores_are_shared()
    loadavg.write_text("0.50 0.40 0.30 2/140 4711\n")
    assert devices.cores_are_shared()
    monkeypatch.setattr(devices, "_own_running_threads", lambda: 2)
    assert not devices.cores_are_shared()
    monkeypatch.setattr(devices, "_own_running_threads", lambda: 1)
    monkeypatch.setattr(devices.time, "sleep", lambda _: loadavg.write_text("0.50 0.40 0.30 1/140 4711\n"))
    assert not devices.cores_are_shared()
    loadavg.write_text("something else")
    assert not devices.cores_are_shared()


def test_this_process_s_own_running_threads_are_not_somebody_else():
    over = threading.Event()

    def spin():
        while not over.is_set():
            pass

    assert any(devices._own_running_threads() == 1 for _ in range(200))  # those of numpy's BLAS go to sleep soon
    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert any(devices._own_running_threads() > 1 for _ in range(200))
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
