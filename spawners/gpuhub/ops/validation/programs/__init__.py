"""The programs of the validation's jobs. They run in the notebook image, which has torch and psutil, and not gpuhub.

Each writes `result.json` into its own folder, the job's run folder.
"""
