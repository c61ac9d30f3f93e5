# Begins each script that prints what a machine has as lines KEY=VALUE: user, rights and system. POSIX sh; changes nothing.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH
LC_ALL=C
export LC_ALL

has() { command -v "$1" >/dev/null 2>&1; }

user=$(id -un 2>/dev/null || id -u)
echo "user=$user"
if [ "$(id -u)" -eq 0 ]; then
    sudo=root
elif has sudo && sudo -n true </dev/null 2>/dev/null; then
    sudo=yes
else
    sudo=no
fi
echo "sudo=$sudo"
echo "groups=$(id -nG "$user" 2>/dev/null)"

# Docker's socket and secret files are for root.
as_root() {
    if [ "$sudo" = yes ]; then
        sudo -n "$@" </dev/null
    else
        "$@" </dev/null
    fi
}

if [ -r /etc/os-release ]; then
    (
        . /etc/os-release
        echo "distribution=${ID:-}"
        echo "release=${VERSION_ID:-}"
        echo "codename=${VERSION_CODENAME:-}"
        echo "os=${PRETTY_NAME:-${NAME:-}}"
    )
fi
