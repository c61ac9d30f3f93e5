"""Every kernel of the image has `%gpu_launch`. Goes to /etc/ipython/."""

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by traitlets

c.InteractiveShellApp.extensions.append("gpu_launch")
