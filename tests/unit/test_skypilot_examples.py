"""The table of SkyPilot's examples: which row each file is in."""

from __future__ import annotations

from pathlib import Path

from tests.support.skypilot_examples import build_table

FILES = {
    "minimal": "run: nvidia-smi\n",
    "note": "resources: {cloud: aws, accelerators: V100}\nrun: nvidia-smi\n",
    "env": "envs: {TOKEN: null}\nresources: {accelerators: A100:8}\nrun: echo $TOKEN\n",
    "conda": "setup: conda create -n x\nrun: nvidia-smi\n",
    "serve/one": "resources: {accelerators: A100}\nfile_mounts: {data: ./one.yaml}\nrun: ls data\n",
    "serve/two": "resources: {accelerators: A100}\nfile_mounts: {data: serve/one.yaml}\nrun: ls data\n",
    "port": "resources:\n  accelerators: A100\n  ports: 8080\nrun: serve\n",
    "tpu": "resources:\n  accelerators: tpu-v4-8\nrun: train\n",
    "image": "resources: {image_id: docker:x}\nrun: x\n",
    "bucket": "file_mounts:\n  ~/data: s3://bucket\nrun: x\n",
    "policy/labels": "admin_policy: labels.Policy\n",
}
TABLE = """\
11 files; not task files: 1

| | examples |
|---|---|
| accepted with notes (2) | `minimal`, `note` |
| accepted with notes; a server at an address of the hub (1) | `port` |
| accepted without a note (3) | `env`, `serve/{one,two}` |
| accepted; names TPUs or Inferentia, so a real cluster refuses it (1) | `tpu` |
| accepted; the commands need conda in the image (1) | `conda` |
| refused without `--profile`: a container image (1) | `image` |
| refused: `file_mounts` with a bucket (1) | `bucket` |"""


def test_each_file_is_in_the_row_of_what_the_command_says(tmp_path: Path) -> None:
    """Also where it expects its mounts beside it, or below the repository's root."""
    for name, text in FILES.items():
        file = tmp_path / "examples" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "one.yaml").touch()
    assert build_table(tmp_path / "examples") == TABLE
