#!/bin/bash
$options
#SBATCH --requeue
#SBATCH --signal=TERM@$seconds

srun --unbuffered --output $logs/%j_%t.out --error $logs/%j_%t.err $command
code=$$?
[ $$code != $preempted ] || scontrol requeue "$$SLURM_JOB_ID"
exit $$code
