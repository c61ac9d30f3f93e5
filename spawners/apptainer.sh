#!/usr/bin/env bash
# Installs Apptainer for tests on Debian where no `apptainer` is on PATH: the distribution's own package, else
# unstable's, which needs a newer C library than Debian 12 has. It then gets newer libraries in a folder of its own, so
# that no package of the machine changes. apt checks all downloads by Debian's signatures.
set -euo pipefail
version=1.4.5-2
sha256_amd64=26cf96e08fccb0e50ea0f285a5a19f940ee873d167a0680584fe6eba7d197d65
prefix=/usr/local/lib/gpuhub-apptainer
export DEBIAN_FRONTEND=noninteractive

# Without it, an ordinary user's Apptainer unpacks an image at each start. udev sets this mode; containers have no udev.
[ ! -c /dev/fuse ] || [ -d /run/udev ] || chmod 666 /dev/fuse
if command -v apptainer >/dev/null; then exit 0; fi
apt-get update -qq
if [ -n "$(apt-cache madison apptainer)" ]; then
  apt-get install -y -qq --no-install-recommends apptainer >/dev/null
  exit 0
fi
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
[ -n "$mirror" ] || { echo "This release has no package apptainer: install Apptainer 1.2 or newer." >&2; exit 1; }

echo "Installing Apptainer $version from Debian unstable into $prefix …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{state,lists/partial,cache/archives/partial,debs,root}
printf 'Types: deb\nURIs: %s\nSuites: sid trixie\nComponents: main\nSigned-By: %s\n' \
  "$mirror" /usr/share/keyrings/debian-archive-keyring.gpg >"$work/debian.sources"
# $@: arguments of apt-get, which uses none of the machine's own sources and state; a mirror may lag behind by weeks
apart() {
  apt-get -qq -o Acquire::Check-Valid-Until=false -o Dir::Etc::sourcelist="$work/debian.sources" \
    -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
    -o Dir::State="$work/state" -o Dir::State::lists="$work/lists" \
    -o Dir::State::status=/dev/null -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
apart update
cd "$work/debs"
libraries=trixie
if apart download "apptainer=$version" 2>/dev/null; then
  [ "$(dpkg --print-architecture)" != amd64 ] || sha256sum --quiet --check - <<<"$sha256_amd64  $(ls apptainer_*.deb)"
else
  # Unstable keeps one version only.
  echo "  unstable no longer has $version: its current version is installed, with which gpuhub was not tested"
  apart download apptainer/sid
  libraries=sid
fi
apart download "libc6/$libraries" "libseccomp2/$libraries" "libsqlite3-0/$libraries"
for deb in *.deb; do dpkg-deb --extract "$deb" "$work/root"; done

rm -rf "$prefix"
mkdir -p "$prefix/libraries"
starter=$(cd "$work/root/usr" && echo lib/*/apptainer/bin/starter)
mkdir -p "$prefix"/{bin,etc,var/lib,"${starter%/*}"}
cp -a "$work/root/usr/bin/apptainer" "$prefix/bin"
cp -a "$work/root/usr/$starter" "$prefix/$starter"
cp -a "$work/root/etc/apptainer" "$prefix/etc"
cp -a "$work/root/var/lib/apptainer" "$prefix/var/lib"
# Apptainer finds its configuration from the folders of both programs.
ln -s ../etc ../var "$prefix/lib"
find "$work/root/usr/${starter%/apptainer/*}" -maxdepth 1 -name '*.so.*' -exec cp -L {} "$prefix/libraries" \;
loader=$(patchelf --print-interpreter "$prefix/bin/apptainer")
for program in bin/apptainer "$starter"; do
  patchelf --set-interpreter "$prefix/libraries/${loader##*/}" --force-rpath --set-rpath "$prefix/libraries" \
    "$prefix/$program"
done
"$prefix/bin/apptainer" version >/dev/null
ln -sfn "$prefix/bin/apptainer" /usr/local/bin/apptainer
