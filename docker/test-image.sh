#!/usr/bin/env bash
# Builds the image and sees it work. Containers on a private network, each without root, capabilities
# or a writable root file system: a bootstrap and two peers of two stages train ROUNDS rounds, and the
# monitor watches them; each shows its figures to the others. Then each is stopped by SIGTERM: it must
# end within the grace, with exit code 0 or 143, and the others must see that it left, not that it
# broke.
#
#   docker/test-image.sh            builds (minutes the first time), tests, removes the containers
#
# Needs Linux, root, podman and buildah 1.24 or newer; on Debian missing ones are installed. Where no
# registry answers, a debootstrap root file system stands in for the base image. Everything is kept in
# a store of its own, so that nothing of this gets among your images; remove it with
# `docker/test-image.sh clean`. The package index is the one that pip is configured for on this
# machine; it gets into the build, not into the image.
#
# Environment: ROUNDS (3), GRACE_S (60), TORCH_BUILD (cpu), TORCH_INDEX (see Dockerfile), STORE
# (/var/tmp/dilocox-test-image), SWARM_LOCK (a file to hold locked while containers train).
set -euo pipefail
cd "$(dirname "$0")/.."

ROUNDS=${ROUNDS:-3}
GRACE_S=${GRACE_S:-60}
TORCH_BUILD=${TORCH_BUILD:-cpu}
STORE=${STORE:-/var/tmp/dilocox-test-image}
IMAGE=dilocox:test
NAME=dilocox-test-$$
START_LIMIT_S=180
ROUND_LIMIT_S=300
TOOLS=(podman buildah runc conmon netavark aardvark-dns iptables)

work=$(mktemp -d)
containers=()

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    for each in ${containers[@]+"${containers[@]}"}; do
        printf -- '---- %s\n' "$each" >&2
        podman logs --tail 20 "$each" >&2 || true
    done
    exit 1
}

# What podman leaves running must not keep the locks of this script.
podman() { command podman "$@" 8>&- 9>&-; }

clean_up() {
    set +e
    for each in ${containers[@]+"${containers[@]}"}; do
        podman rm --force --volumes --time 0 "$each"
        podman volume rm --force "$each"
    done >"$work/clean.log" 2>&1
    podman network rm --force "$NAME" >>"$work/clean.log" 2>&1
    # a build that was broken off leaves these behind, mounted; only ever in the store of our own
    [ "${CONTAINERS_STORAGE_CONF:-}" = "$work/storage.conf" ] && buildah rm --all >/dev/null 2>&1
    rm -rf "$work"
}

# ---- tools and store -----------------------------------------------------------------------------

install_missing() {  # COMMAND... are Debian packages of the same names
    local missing=()
    for each in "$@"; do
        [ -n "$(PATH=$PATH:/usr/lib/podman type -P "$each")" ] || missing+=("$each")
    done
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || fail "not found: ${missing[*]}; install them"
    say "installing ${missing[*]}"
    { apt-get update && apt-get install --yes --no-install-recommends "${missing[@]}"; } \
        >"$work/apt.log" 2>&1 || fail "apt-get: $(tail -1 "$work/apt.log")"
}

set_up_store() {
    export CONTAINERS_STORAGE_CONF=$work/storage.conf CONTAINERS_CONF=$work/containers.conf
    local driver=overlay run=/run/dilocox-test-image
    grep -qw overlay /proc/filesystems || driver=vfs
    mkdir -p "$STORE" "$run"
    # Two of these at once would take each other's images away.
    exec 8>>"$run/lock"
    flock --nonblock 8 || fail "another test-image.sh runs"
    cat >"$CONTAINERS_STORAGE_CONF" <<CONF
[storage]
driver = "$driver"
graphroot = "$STORE/images"
runroot = "$run/storage"
CONF
    # No systemd is needed: the health checks are run by hand below.
    cat >"$CONTAINERS_CONF" <<CONF
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "$run/libpod"
volume_path = "$STORE/volumes"
[network]
network_config_dir = "$STORE/networks"
CONF
}

clear_leftovers() {  # of a run that was killed: in the store of our own, under our names only
    local each
    for each in $(podman ps --all --quiet --filter name=^dilocox-test-); do
        podman rm --force --volumes --time 0 "$each"
    done
    for each in $(podman volume ls --quiet --filter name=^dilocox-test-); do
        podman volume rm --force "$each"
    done
    for each in $(podman network ls --quiet --filter name=^dilocox-test-); do
        podman network rm --force "$each"
    done
} >>"$work/clean.log" 2>&1

# ---- base image and build ------------------------------------------------------------------------

base_image() {
    sed -n 's/^FROM \([^ ]*\).*/\1/p' docker/Dockerfile | sort -u
}

provide_base() {  # under the name that the Dockerfile uses
    local base suite
    base=$(base_image)
    [ "$(wc -l <<<"$base")" -eq 1 ] || fail "the Dockerfile has more than one base: $base"
    podman image exists "$base" && return
    if timeout 120 podman pull --quiet "$base" >"$work/pull.log" 2>&1; then
        say "pulled $base"
        return
    fi
    suite=${base##*-}
    say "no registry: a debootstrap of $suite stands in for $base"
    install_missing debootstrap
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$suite" \
        "$work/root" >"$work/debootstrap.log" 2>&1 || fail "$(tail -1 "$work/debootstrap.log")"
    tar --directory "$work/root" --create . | podman import --quiet - "$base" >/dev/null
    rm -rf "$work/root"
}

build() {
    local arguments
    mapfile -t arguments < <(python3 docker/pip_arguments.py "$work/pip.conf")
    say "building ($TORCH_BUILD); the log is $STORE/build.log"
    # Docker's format, because OCI's has no health check.
    nice buildah bud --format docker --isolation chroot --layers --pull-never \
        --ulimit nofile=20000:20000 "${arguments[@]}" \
        --build-arg "TORCH_BUILD=$TORCH_BUILD" --build-arg "TORCH_INDEX=${TORCH_INDEX:-}" \
        --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
        --file docker/Dockerfile --tag "$IMAGE" . >"$STORE/build.log" 2>&1 \
        || fail "build: $(grep -a '^error' "$STORE/build.log" || tail -3 "$STORE/build.log")"
    # what newer builds go on from stays; without this the store grows by an image a build
    podman image prune --force --filter until=24h >/dev/null 2>&1 || true
    say "image: $(podman image inspect --format '{{.Size}}' "$IMAGE") bytes"
}

check_image() {
    local found
    found=$(podman image inspect --format \
        '{{.User}} {{.Config.StopSignal}} {{index .Labels "org.opencontainers.image.title"}}' \
        "$IMAGE")
    [ "$found" = "10001:10001 SIGTERM dilocox" ] || fail "user, stop signal, title: $found"
    podman image inspect "$IMAGE" | grep health.py >/dev/null || fail "the image has no health check"
    local code=0
    once peer nonsense >"$work/mistake.log" 2>&1 || code=$?
    [ "$code" -eq 2 ] || fail "a wrong invite ended with $code: $(tail -1 "$work/mistake.log")"
}

# ---- containers ----------------------------------------------------------------------------------

HARD=(--read-only --cap-drop ALL --security-opt no-new-privileges
    --ulimit nofile=20000:20000 --ulimit nproc=4096:4096)

once() { podman run --rm --network none --no-healthcheck "${HARD[@]}" "$IMAGE" "$@"; }

start() {  # ROLE, options of podman run, --, command
    local role=$1 options=()
    shift
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    containers+=("$NAME-$role")
    podman run --detach --name "$NAME-$role" --network "$NAME" --network-alias "$role" \
        --volume "$NAME-$role:/data" "${HARD[@]}" "${options[@]}" "$IMAGE" "$@" \
        >"$work/start.log" 2>&1 || fail "$role did not start: $(tail -2 "$work/start.log")"
}

run_in() { podman exec "$NAME-$1" "${@:2}"; }

fetch() {  # ROLE URL
    run_in "$1" python3 -c 'import sys, urllib.request as r
sys.stdout.write(r.urlopen(sys.argv[1], timeout=10).read().decode())' "$2"
}

until_true() {  # LIMIT_S WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || fail "in vain waited for: $what"
        for each in "${containers[@]}"; do
            if [ "$(podman inspect --format '{{.State.Status}}' "$each")" = exited ] \
                && [ "$each" != "${stopped:-}" ]; then
                fail "$each has ended by itself"
            fi
        done
        sleep 1
    done
}

event() { run_in "$1" sh -c "grep -hE '$2' /data/*-stage*/events.jsonl"; }  # ROLE PATTERN
rounds() { event "$1" '"event": "round"' | wc -l; }
has_rounds() { [ "$(rounds "$1")" -ge "$2" ]; }
is_healthy() { podman healthcheck run "$NAME-$1"; }
waits_for_stage_1() { run_in peer-0 sh -c "grep -q 'stage 1 has no peer' /data/*-stage0/status.json"; }

start_peer() {  # STAGE
    start "peer-$1" --env DILOCOX_STAGE="$1" --env DILOCOX_THREADS=1 --env DILOCOX_PORT=31337 \
        --env DILOCOX_INVITE="$invite" -- peer
}

stop() {  # ROLE: it ends within the grace, with a code that says that it was asked
    local began took code
    stopped=$NAME-$1
    began=$(date +%s%N)
    podman stop --time "$GRACE_S" "$stopped" >"$work/stop.log" 2>&1 || true
    took=$((($(date +%s%N) - began) / 1000000))
    code=$(podman inspect --format '{{.State.ExitCode}}' "$stopped")
    say "$1 ended $took ms after SIGTERM with exit code $code"
    case $code in 0 | 143) ;; *) fail "$1: exit code $code" ;; esac
    [ "$took" -lt $((GRACE_S * 1000)) ] || fail "$1 used up its grace"
}

# ---- the test ------------------------------------------------------------------------------------

train() {
    podman network create --internal "$NAME" >/dev/null
    start bootstrap --volume "$PWD/docker/demo.yaml:/etc/dilocox/run.yaml:ro" \
        --env DILOCOX_MANIFEST=/etc/dilocox/run.yaml --env DILOCOX_PORT=31337 -- bootstrap
    until_true "$START_LIMIT_S" "an invite" run_in bootstrap test -s /data/invite
    invite=$(run_in bootstrap cat /data/invite)
    say "bootstrap is up: $invite"
    start_peer 0
    start_peer 1
    until_true "$ROUND_LIMIT_S" "$ROUNDS rounds of stage 0" has_rounds peer-0 "$ROUNDS"
    until_true "$ROUND_LIMIT_S" "$ROUNDS rounds of stage 1" has_rounds peer-1 "$ROUNDS"
    say "trained: $(podman logs "$NAME-peer-0" 2>&1 | grep -o 'round [0-9]* committed.*validation [0-9.]*' | tail -1)"
    for role in bootstrap peer-0 peer-1; do
        [ "$(run_in "$role" id -u)" = 10001 ] || fail "$role does not run as 10001"
        until_true 60 "$role healthy" is_healthy "$role"
        # as Prometheus would: from another container, by name
        fetch peer-0 "http://$role:9400/metrics" >"$work/$role.metrics" \
            && grep '^dilocox_' "$work/$role.metrics" >/dev/null || fail "$role has no metrics"
    done
    say "all run as 10001 on a read-only root, are healthy and show their figures"
    until_true 60 "the archive's rounds in the bootstrap's figures" keeps_round $((ROUNDS - 1))
    fetch peer-0 http://bootstrap:9400/metrics | grep -v '^#'
}

watch() {
    mkdir -p "$work/swarm"
    printf '%s\n' "$invite" >"$work/swarm/invite"
    chmod -R a+rX "$work/swarm"
    start monitor --env INVITE_FILE=/swarm/invite --volume "$work/swarm:/swarm:ro" \
        --env DILOCOX_PORT=9470 -- monitor
    until_true "$START_LIMIT_S" "the monitor's health" \
        run_in monitor python3 -I /opt/dilocox/health.py http://127.0.0.1:9470/healthz
    until_true 60 "two peers in the monitor's metrics" sees_peers 2
    fetch monitor http://127.0.0.1:9470/ | grep -i '<html' >/dev/null || fail "the monitor has no page"
    say "the monitor sees both peers"
}

keeps_round() {  # NUMBER: the bootstrap shows that it keeps both stages up to it
    [ "$(fetch peer-0 http://bootstrap:9400/metrics \
        | awk -v least="$1" '/^dilocox_bootstrap_archive_round/ {n += $NF >= least} END {print n + 0}')" -eq 2 ]
}

sees_peers() {  # COUNT of those that the monitor counts as training
    [ "$(fetch monitor http://127.0.0.1:9470/metrics \
        | awk '/^dilocox_swarm_peers\{.*state="training"/ {sum += $NF} END {print sum + 0}')" -eq "$1" ]
}

leave() {
    local before
    stop peer-1
    until_true 60 "peer-0's word that peer-1 left" event peer-0 '"event": "fault".*"reason": "left"'
    event peer-0 '"reason": "(closed|silent|stuck|missing)"' && fail "peer-0 saw more than a leave"
    until_true 60 "the record of peer-1 says that it left" waits_for_stage_1
    say "peer-0 saw peer-1 leave: $(event peer-0 '"reason": "left"' | tail -1)"

    before=$(rounds peer-0)
    podman start "$NAME-peer-1" >/dev/null 2>&1
    stopped=
    until_true "$ROUND_LIMIT_S" "a round with peer-1 back" has_rounds peer-0 $((before + 1))
    [ "$(podman logs "$NAME-peer-1" 2>&1 | grep -oE 'peer 12D3KooW[A-Za-z0-9]+' | sort -u | wc -l)" -eq 1 ] \
        || fail "peer-1 came back as another peer"
    say "peer-1 came back from its volume as the same peer, and trains"

    stop peer-0
    until_true 60 "peer-1's word that its head left" event peer-1 '"its head dissolved it"'
    say "peer-1 saw its head leave: $(event peer-1 '"event": "dissolved"' | tail -1)"
    until_true 60 "no peer training in the monitor's view" sees_peers 0
    stop monitor
    stop peer-1
    stop bootstrap
}

main() {
    [ "$(id -u)" -eq 0 ] || { echo "error: run this as root" >&2; exit 2; }
    if [ "${1:-}" = clean ]; then
        awk -v store="$STORE/" 'index($2, store) == 1 {print $2}' /proc/mounts | tac | xargs -r umount
        rm -rf "$STORE"
        rm -rf "$work"
        exit 0
    fi
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    install_missing "${TOOLS[@]}"
    set_up_store
    clear_leftovers || true
    provide_base
    build
    check_image
    if [ -n "${SWARM_LOCK:-}" ]; then
        exec 9>>"$SWARM_LOCK"
        flock 9
    fi
    train
    watch
    leave
    say "PASSED"
}

main "$@"
