"""Ranks' log files followed: split characters, readers that are behind, writers without end."""

from __future__ import annotations

from gpu_launch.worker.log_files import LogTail


def test_log_files_are_followed_by_rank_and_stream(tmp_path):
    """Split characters are joined, a reader far behind jumps ahead, another run's files are left alone."""
    for folder in ("run-1_abc", "old_abc"):
        for local in ("0", "1"):
            (tmp_path / folder / "attempt_0" / local).mkdir(parents=True)
            for stream in ("stdout", "stderr"):
                (tmp_path / folder / "attempt_0" / local / f"{stream}.log").write_text(
                    "old\n" if folder[0] == "o" else ""
                )
    tail = LogTail(tmp_path, run_id="run-1", first_rank=2, processes=2)
    path = tmp_path / "run-1_abc" / "attempt_0" / "1" / "stdout.log"
    assert tail.read() == []
    path.write_bytes("ü".encode()[:1])
    assert [entry[3] for entry in tail.read()] == [""]
    path.write_bytes("ü\n".encode())
    ((rank, stream, _, text),) = tail.read()
    assert (rank, stream, text) == (3, "stdout", "ü\n")
    with path.open("ab") as file:
        file.write(b"x" * 5_000_000)
    passed, rest = tail.read()
    assert (passed[3], passed[4] + len(rest[3])) == (None, 5_000_000)
    assert tail.read_stderr_end(2) == ("", 0)
    tail.close()


def test_rank_with_endless_output_is_followed_at_a_limited_rate(tmp_path):
    """Some of it every second, all of it counted; at the end the end."""
    log = tmp_path / "run-1_abc" / "attempt_0" / "0"
    log.mkdir(parents=True)
    (log / "stderr.log").touch()
    now = [0.0]
    tail = LogTail(tmp_path, run_id="run-1", first_rank=0, processes=1, clock=lambda: now[0])
    sent = 0
    with (log / "stdout.log").open("ab", buffering=0) as file:
        for _ in range(500):
            file.write(b"x" * 79_999 + b"\n")
            now[0] += 0.02
            sent += sum(len(entry[3] or "") for entry in tail.read())
        assert 4_000_000 < sent < 9_000_000
        file.write(b"the end\n")
    last = ""
    while entries := tail.read(everything=True):
        last = entries[-1][3]
    tail.close()
    assert last.endswith("the end\n")
