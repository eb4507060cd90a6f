"""Facts about a host, read from files of the system that a test writes."""

from pathlib import Path

import pytest

from distdl_jax.doctor import collect_host
from distdl_jax.doctor.measure import pairs

V2 = {
    "/proc/self/cgroup": "0::/job/step\n",
    "/sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/job/cpu.max": "150000 100000\n",
    "/sys/fs/cgroup/job/step/memory.max": "max\n",
    "/sys/fs/cgroup/job/memory.max": "1073741824\n",
}
V1 = {
    "/proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n",
    "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
    "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1073741824\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(("files", "limits"), [(V2, (1.5, 2**30)), (V1, (1.5, 2**30)), ({}, (None, None))])
def test_limits_of_a_cgroup(files, limits, monkeypatch):
    """The smallest of a process's own cgroup and those around it."""
    monkeypatch.setattr(collect_host, "_text", lambda path: files.get(str(path), ""))
    assert (collect_host._quota(), collect_host._memory_limit()) == limits


def test_the_file_system_of_a_path_is_that_of_the_longest_mount_point(monkeypatch):
    mounts = "/dev/sda1 / ext4 rw 0 0\nserver:/x /scratch nfs4 rw 0 0\ntmpfs /scratch/fast\\040disk tmpfs rw 0 0\n"
    monkeypatch.setattr(collect_host, "_text", lambda path: mounts)
    kinds = [
        collect_host._filesystem(Path(path))
        for path in ("/home", "/scratch/me", "/scratchpad", "/scratch/fast disk/run")
    ]
    assert kinds == ["ext4", "nfs4", "ext4", "tmpfs"]


def test_a_folder_that_is_not_there_yet(tmp_path):
    found = collect_host.folder(str(tmp_path / "new" / "folder"))
    assert found is not None and found.problem is None and found.free
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    found = collect_host.folder(str(tmp_path / "file" / "folder"))
    assert found is not None and found.problem == "Not a directory"


@pytest.mark.parametrize(("mode", "anyone"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_folder_that_anyone_may_change(tmp_path, mode, anyone):
    tmp_path.chmod(mode)
    found = collect_host.folder(str(tmp_path))
    assert found is not None and found.anyone_writes == anyone


def test_worker_0_exchanges_messages_with_its_host_and_with_others():
    assert pairs(["a"]) == []
    assert pairs(["a", "b", "a", "b"]) == [(0, 2), (0, 1)]
    assert pairs([f"host{number // 2}" for number in range(40)]) == [(0, 1)] + [(0, 2 * k) for k in range(1, 9)]
