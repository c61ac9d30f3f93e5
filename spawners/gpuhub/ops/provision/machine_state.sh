# Prints what a machine has as lines KEY=VALUE, after machine_basics.sh. POSIX sh; changes nothing. `gpuhub node prepare`
# sends it over SSH.
echo "kernel=$(uname -r)"
echo "architecture=$(uname -m)"
for device in /sys/bus/pci/devices/*; do
    if [ "$(cat "$device/vendor" 2>/dev/null)" = 0x10de ]; then
        case $(cat "$device/class" 2>/dev/null) in
        0x03*) echo "gpu=${device##*/} $(cat "$device/device")" ;;
        esac
    fi
done
echo "loaded_driver=$(cat /sys/module/nvidia/version 2>/dev/null)"
for file in /sys/firmware/efi/efivars/SecureBoot-*; do
    if [ -r "$file" ]; then
        # Four bytes of attributes, then the value.
        echo "secure_boot=$(od -An -t u1 -j 4 -N 1 "$file" | tr -d ' ')"
    fi
done
if has docker; then
    echo "docker=$(as_root docker version --format '{{.Server.Version}}' 2>/dev/null)"
    echo "runtimes=$(as_root docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' 2>/dev/null)"
fi
if has nvidia-ctk; then
    echo "toolkit=$(nvidia-ctk --version 2>/dev/null | sed -n 's/.*version //p' | head -n 1)"
fi
if has dpkg-query; then
    dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n' 'linux-image-*' 'nvidia-driver*' 'nvidia-headless*' \
        'nvidia-tesla*driver' 'nvidia-open*' 'cuda-drivers*' 'linux-modules-nvidia-*' docker.io docker-ce moby-engine \
        docker-cli apparmor nvidia-container-toolkit chrony systemd-timesyncd ntp ntpsec openntpd nfs-common curl ca-certificates \
        2>/dev/null | sed -n 's/^installed /package=/p'
fi
if has apt-cache; then
    echo "driver_candidate=$(apt-cache policy nvidia-driver 2>/dev/null | sed -n 's/^ *Candidate: *//p' | grep -v none)"
    {
        apt-cache pkgnames nvidia-driver-
        apt-cache pkgnames linux-modules-nvidia- | grep -E '^linux-modules-nvidia-[0-9]+(-server)?(-open)?-[a-z]'
        apt-cache pkgnames docker-cli
    } 2>/dev/null | sort | sed 's/^/available=/'
fi
if has ubuntu-drivers; then
    echo "recommended=$(ubuntu-drivers devices 2>/dev/null | sed -n 's/^driver *: *\([^ ]*\) .*recommended.*/\1/p' | head -n 1)"
fi
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
    if [ -r "$file" ]; then
        echo "source=$(base64 -w 0 "$file") $file"
    fi
done
echo end=
