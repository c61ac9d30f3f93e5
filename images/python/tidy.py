"""Removes what no notebook needs (tests, static libraries) from packages below a prefix, and compiles the rest.

torch's headers stay: torch.compile and C++ extensions need them.
"""

import compileall
import shutil
import sys
from pathlib import Path

#: Where the packages are in the end; the prefix is another folder while a layer is built.
ENVIRONMENT = "/opt/gpuhub"
#: Patterns below site-packages.
USELESS = (
    "**/tests",
    "**/*.a",
    "torch/test",
    "torch/share/cmake",
    "torch/bin/*est*",
    "torch/bin/protoc*",
    "torch/bin/upgrader_models",
    "torch/lib/*test*",
    "nvidia/**/include",
)
#: Below the prefix: JupyterLab would load it at its start, and ipyparallel's panel for clusters is not the way to GPUs.
UNUSED_EXTENSION = "share/jupyter/labextensions/ipyparallel-labextension"


def main(prefix: Path) -> None:
    """Deletes every match of USELESS below the prefix's site-packages and compiles what is left to .pyc files."""
    freed = 0
    shutil.rmtree(prefix / UNUSED_EXTENSION, ignore_errors=True)
    for packages in prefix.glob("lib/python3*/site-packages"):
        for pattern in USELESS:
            for path in sorted(packages.glob(pattern)):
                if path.is_dir() and not path.is_symlink():
                    freed += sum(p.lstat().st_size for p in path.rglob("*") if not p.is_dir())
                    shutil.rmtree(path)
                elif path.is_symlink() or path.exists():
                    freed += path.lstat().st_size
                    path.unlink()
        # All cores, where pip would use one; templates and old examples that are no Python 3 are passed over.
        compileall.compile_dir(packages, workers=0, quiet=2, stripdir=str(prefix), prependdir=ENVIRONMENT)
    sys.stdout.write(f"removed {freed // 1_000_000} MB\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
