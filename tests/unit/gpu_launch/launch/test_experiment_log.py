"""The requests that MLflow gets for a launch. The answers are those of MLflow 3.17.2; `test_up_services.py` asks a real one."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest

from gpu_launch import environment
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.launch.experiment_log import ExperimentLog, ExperimentSettings, find_settings
from gpu_launch.launch.plan import make_plan
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest
from gpu_launch.options.command import parse_words
from tests.support.launch.answering_server import AnsweringServer

RUN = "caad89e6953b416181393389de30631f"
MISSING = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "Could not find experiment with name 'ada/work'"}
EXISTS = 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "Experiment(name=ada/work) already exists."}
INVALID = 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "Changing param values is not allowed."}


class MlflowServer(AnsweringServer):
    """Answers as MLflow does; `answers` has others, by method, one after the other."""

    def __init__(self):
        self.calls = []
        self.answers = {}
        super().__init__()

    def handle(self, method, path, body):
        name = urlsplit(path).path.removeprefix("/api/2.0/mlflow/")
        sent = json.loads(body) if body else parse_qs(urlsplit(path).query)
        self.calls.append((name, sent))
        if self.answers.get(name):
            status, answer = self.answers[name].pop(0)
            return status, json.dumps(answer).encode()
        answers = {
            "experiments/get-by-name": {"experiment": {"experiment_id": "2", "name": "ada/work"}},
            "experiments/create": {"experiment_id": "2"},
            "runs/create": {"run": {"info": {"run_id": RUN, "experiment_id": "2", "status": "RUNNING"}}},
            "runs/log-batch": {},
            "runs/update": {"run_info": {"run_id": RUN}},
        }
        return 200, json.dumps(answers[name]).encode()

    def find(self, name):
        return [sent for called, sent in self.calls if called == name]


@pytest.fixture
def server():
    found = MlflowServer()
    yield found
    found.close()


def build_log(server, **changes):
    uri = server.url.removesuffix("/services/broker")
    settings = ExperimentSettings(
        uri=uri, experiment="ada/work", name="train.py", user="ada", params={"command": "train.py"}
    )
    return ExperimentLog(replace(settings, **changes))


def build_request(tmp_path, *words, environ=(), cell=None):
    env = environment.read({"HOME": str(tmp_path), "JUPYTERHUB_USER": "ada", "GPUHUB_GPU_UUIDS": "GPU-1"})
    (tmp_path / "work").mkdir()
    options = parse_words(list(words), cell=cell is not None)
    request = LaunchRequest(options=options, cell=cell, cwd=tmp_path / "work", env=env, environ=dict(environ))
    plan = make_plan(env, nnodes=1, least_nnodes=None, nproc_per_node=1, demand=GpuRequest())
    return ValidatedRequest(request=request, plan=plan, script="")


@pytest.mark.parametrize("uri", ["", "file:///home/ada/mlruns", "sqlite:///mlflow.db", "databricks"])
def test_only_a_server_is_told_of_launches(tmp_path, uri):
    """Other kinds of stores are the script's own, and nothing is sent where there is none."""
    validated = build_request(tmp_path, "train.py")
    assert find_settings(validated, {"MLFLOW_TRACKING_URI": uri}, "run-1") is None
    log = ExperimentLog(None)
    log.start()
    log.report(1, {"loss": 1.0})
    assert log.build_rank_environ() == {}
    log.finish("done", "rig1")


def test_the_users_own_server_comes_first(tmp_path):
    """Set in the notebook, it replaces the cluster's; the token is in no text."""
    own = {"MLFLOW_TRACKING_URI": "https://mlflow.example/", "MLFLOW_TRACKING_TOKEN": "secret"}
    validated = build_request(tmp_path, "train.py", "--lr", "0.1", environ=own)
    settings = find_settings(validated, {"MLFLOW_TRACKING_URI": "http://127.0.0.1:18034/services/mlflow"}, "run-1")
    assert (settings.uri, settings.token) == ("https://mlflow.example", "secret")
    assert "secret" not in repr(settings)
    assert (settings.experiment, settings.name, settings.user) == ("ada/work", "train.py", "ada")
    assert settings.params["command"] == "train.py --lr 0.1"
    assert settings.params["launch"] == "run-1"
    named = find_settings(validated, {"MLFLOW_EXPERIMENT_NAME": "mnist"}, "run-1")
    assert named.experiment == "mnist"


@pytest.mark.parametrize(
    ("folder", "experiment"), [("", "ada"), ("work/mnist", "ada/mnist"), ("gpu-launch/train-3f2a91", "ada/train")]
)
def test_a_project_is_one_experiment(tmp_path, folder, experiment):
    """Also where each launch from a laptop has a folder of its own."""
    validated = build_request(tmp_path, "train.py", environ={"MLFLOW_TRACKING_URI": "http://x"})
    validated = replace(validated, request=replace(validated.request, cwd=tmp_path / folder))
    assert find_settings(validated, {}, "run-1").experiment == experiment


def test_a_launch_is_a_run_with_parameters_metrics_and_its_end(server):
    """Numbers alone, under names that MLflow accepts; the script's own runs become its children."""
    log = build_log(server)
    log.start()
    assert log.build_rank_environ() == {
        "MLFLOW_EXPERIMENT_NAME": "ada/work",
        "MLFLOW_RUN_CONTEXT": json.dumps({"mlflow.parentRunId": RUN}),
    }
    log.report(1, {"loss": 0.5, "acc?": 1, "note": "x", "bad": float("inf"), "none": None})
    log.report("one", {"loss": 1.0})
    log.report(2, None)
    log.finish("done", "rig1 RTX 5090")
    assert log.pop_notes() == []
    (created,) = server.find("runs/create")
    assert (created["experiment_id"], created["run_name"], created["user_id"]) == ("2", "train.py", "ada")
    params, metrics, gpus = server.find("runs/log-batch")
    assert params["params"] == [{"key": "command", "value": "train.py"}]
    assert [(one["key"], one["value"], one["step"]) for one in metrics["metrics"]] == [
        ("loss", 0.5, 1),
        ("acc_", 1.0, 1),
    ]
    assert gpus["params"] == [{"key": "gpus", "value": "rig1 RTX 5090"}]
    (ended,) = server.find("runs/update")
    assert (ended["run_id"], ended["status"]) == (RUN, "FINISHED")


@pytest.mark.parametrize(("outcome", "status"), [("failed", "FAILED"), ("interrupted", "KILLED")])
def test_how_it_ended(server, outcome, status):
    """In MLflow's words."""
    log = build_log(server)
    log.start()
    log.finish(outcome, "")
    assert server.find("runs/update")[0]["status"] == status


def test_a_new_experiment_is_created_once(server):
    """Two launches may both find none."""
    server.answers = {"experiments/get-by-name": [MISSING], "experiments/create": [EXISTS]}
    log = build_log(server)
    log.start()
    log.finish("done", "")
    assert len(server.find("experiments/get-by-name")) == 2
    assert server.find("experiments/create") == [{"name": "ada/work"}]
    assert server.find("runs/create")[0]["experiment_id"] == "2"


def test_a_refusal_is_a_note_and_no_failure(server):
    """It says what is lost."""
    server.answers = {"runs/log-batch": [(200, {}), INVALID]}
    log = build_log(server)
    log.start()
    log.report(1, {"loss": 0.5})
    log.finish("done", "")
    assert log.pop_notes() == ["MLflow: Changing param values is not allowed. The rest of this launch is not logged."]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (502, b"<html>502</html>", "answered 502"),
        (502, b"[]", "answered 502"),
        (200, b"[]", "its answers are not MLflow's"),
        (200, b"{}", "its answers are not MLflow's"),
        (200, b"<html>", "does not answer (Expecting value"),
    ],
)
def test_a_server_that_is_none(server, status, body, reason, monkeypatch):
    """Such as a proxy's page: the launch continues, and its ranks get no variables."""
    monkeypatch.setattr(server, "handle", lambda *_: (status, body))
    log = build_log(server)
    log.start()
    assert log.build_rank_environ() == {}
    log.finish("done", "")
    (note,) = log.pop_notes()
    assert reason in note
    assert note.endswith(". This launch is not logged.")


def test_nobody_answers(server):
    """The launch gets a note at once."""
    log = build_log(server, uri="http://127.0.0.1:1")
    log.start()
    assert log.build_rank_environ() == {}
    (note,) = log.pop_notes()
    assert note == (
        "MLflow: http://127.0.0.1:1 does not answer ([Errno 111] Connection refused). This launch is not logged."
    )


def test_a_slow_server_holds_no_launch_up(server, monkeypatch):
    """Reports that cannot be sent are left out in the end."""
    is_over, handle = threading.Event(), server.handle

    def hold(method, path, body):
        is_over.wait(30)
        return handle(method, path, body)

    monkeypatch.setattr(server, "handle", hold)
    monkeypatch.setattr("gpu_launch.launch.experiment_log._CREATED_S", 0.1)
    monkeypatch.setattr("gpu_launch.launch.experiment_log._FINISHED_S", 0.1)
    log = build_log(server)
    log.start()
    assert log.build_rank_environ() == {}
    for step in range(5000):
        log.report(step, {"loss": 1.0})
    log.finish("done", "")
    is_over.set()
    log._thread.join(30)
    assert len(server.find("runs/create")) == 1


def test_nothing_follows_a_redirect(server, monkeypatch):
    """It would take the token along."""
    monkeypatch.setattr(server, "handle", lambda *_: (302, b""))
    log = build_log(server, token="secret")
    log.start()
    log.finish("done", "")
    (note,) = log.pop_notes()
    assert "answered 302" in note
