#!/bin/sh
# Runs `dilocox "$@"`. With INVITE_FILE, and without an invite in the environment, it waits for that
# file and takes the invite from it: a secret, or what a bootstrap beside this container writes.
set -eu

WAIT_S=${INVITE_WAIT_S:-300}

if [ -n "${INVITE_FILE:-}" ] && [ -z "${DILOCOX_INVITE:-}" ]; then
    waited=0
    until [ -s "$INVITE_FILE" ]; do
        if [ "$waited" -ge "$WAIT_S" ]; then
            echo "error: no invite in $INVITE_FILE after $WAIT_S s; is the bootstrap up?" >&2
            exit 1
        fi
        sleep 1
        waited=$((waited + 1))
    done
    DILOCOX_INVITE=$(cat "$INVITE_FILE")
    export DILOCOX_INVITE
fi
exec dilocox "$@"
