set -euo pipefail
tpus() { gcloud compute tpus "$$1" "$$2" $name $place --quiet "$${@:3}"; }
state() { tpus queued-resources describe '--format=value(state.state)'; }
{
  while true; do
    case $$(state 2> /dev/null || echo NONE) in
      NONE) tpus queued-resources create --node-id=$name $kind ;;
      SUSPENDED) tpus queued-resources delete --force ;;  # spot, reclaimed
      FAILED) echo '$name: FAILED' >&2; exit 1 ;;
      ACTIVE) break ;;
      *) sleep 30 ;;
    esac
  done
  tpus tpu-vm ssh --worker=all --command=$remote
} < /dev/null
