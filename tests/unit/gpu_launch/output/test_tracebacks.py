"""The part of a rank's stderr that is its own error."""

from __future__ import annotations

from gpu_launch.output import tracebacks

OWN = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: bad data'


def test_a_traceback_begins_with_the_users_own_frames():
    """What started the script is left out, in every traceback of a chain; C++'s log and frames are too."""
    starting = (
        '  File "/opt/gpu_launch/worker/child.py", line 3, in serve\n    run()\n    ^^^^^\n'
        '  File "/opt/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 9, in wrapper\n    return f()\n'
        '  File "<frozen runpy>", line 88, in _run_code\n'
    )
    user = '  File "/home/ada/.gpu_launch/jobs/x/cell.py", line 2, in <module>\n    1 / 0\n    ~~^~~\n'
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one = f"{tracebacks.HEADER}\n{starting}{user}ZeroDivisionError: division by zero\n"
    text = f"noise\n{one}{chained}{one}[W1121 12:00:00.1 Proc.cpp:15] warning\nframe #1: x in libc10.so\n"
    clean = f"{tracebacks.HEADER}\n{user}ZeroDivisionError: division by zero\n"
    assert tracebacks.extract_own_error(text) == f"{clean}{chained}{clean}".strip()
    prefixed = "".join(f"[rank1]: {line}\n" for line in one.splitlines())
    assert tracebacks.extract_own_error(prefixed) == clean.strip()


def test_a_traceback_of_starting_alone_stays_whole():
    """Such as of a script that is not there."""
    text = f'{tracebacks.HEADER}\n  File "<frozen runpy>", line 286, in run_path\nFileNotFoundError: x.py'
    assert tracebacks.extract_own_error(text) == text


def test_common_torch_startup_messages_are_not_errors():
    """Of a rank that was killed it would be all there is; other lines of its log tell something."""
    idle = "[W1122 04:14:26.7 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    assert tracebacks.extract_own_error(f"{idle}\n[rank1]:{idle}\n") == ""
    told = "[W1122 04:14:26.7 socket.cpp:460] [c10d] recvValue failed on SocketImpl"
    assert tracebacks.extract_own_error(f"{idle}\n{told}\n") == told


def test_an_earlier_traceback_that_was_handled_is_left_out():
    """What an exception was raised from is shown as well."""
    chained = f"{OWN}\n\nThe above exception was the direct cause of the following exception:\n\n{OWN.replace('bad', 'worse')}"
    assert tracebacks.extract_own_error(f"{OWN}\nwarning: unrelated\n{chained}\n") == chained


def test_a_group_of_exceptions_keeps_its_first_line():
    """Its header is not at the line's beginning."""
    text = f'  + Exception Group {tracebacks.HEADER}\n  |   File "t.py", line 1, in <module>\n  | ExceptionGroup: many'
    assert tracebacks.extract_own_error(f"noise\n{text}") == text


def test_without_a_traceback_the_last_lines_are_shown():
    """Such as a syntax error's, or a crash's."""
    assert tracebacks.extract_own_error('  File "x.py", line 1\n    a b\nSyntaxError: invalid syntax\n').endswith(
        "SyntaxError: invalid syntax"
    )
    assert tracebacks.find_exception_line(OWN) == "ValueError: bad data"
    assert tracebacks.find_exception_line("") == ""


def test_traceback_after_a_progress_bar_starts_on_its_own_line():
    """tqdm does not end its line before the traceback is written."""
    assert tracebacks.extract_own_error(f"\r 45%|##  | 45/100 [00:12<00:15, 3.6it/s]{OWN}") == OWN
