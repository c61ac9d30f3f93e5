"""Start a detached job that sleeps, as a cell of the notebook does. Arguments: name, options."""

import json
import os
import sys

from IPython.core.interactiveshell import InteractiveShell

wanted = json.load(sys.stdin)
home = os.path.expanduser("~")
os.chdir(home)
with open(f"{wanted['name']}.py", "w") as file:
    file.write("import time\nprint('started', flush=True)\ntime.sleep(36000)\n")
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "gpu_launch")
done = shell.run_cell(f"%gpu_launch --detach {wanted['options']} {wanted['name']}.py", store_history=True)
print(json.dumps({"error": repr(done.error_in_exec) if done.error_in_exec else None}))
