# Login shells (Lab's terminals) start with Debian's own PATH: the image's Python comes first, the user's programs last.
PATH="/opt/gpuhub/bin:$PATH:$HOME/.local/bin"
