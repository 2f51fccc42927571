"""[cluster]: how `cosmos-rl launch` starts the processes of a run on the machines of a platform."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from cosmos_rl_core.settings.base import Strict


class SlurmSection(Strict):
    """[cluster.slurm]: options of the jobs that `cosmos-rl launch --on slurm` submits."""

    partition: str = ""
    """Partition of the jobs. Not set: Slurm's default."""
    rollout_partition: str = ""
    """Partition of the rollout jobs, such as one whose jobs may be preempted. Not set: `partition`."""
    account: str = ""
    """Account that is charged. Not set: the user's default."""
    qos: str = ""
    """Quality of service. Not set: the account's default."""
    time: str = ""
    """Time limit of a job, such as "04:00:00". Before it the run saves and submits itself again. Not set: that of the
    partition."""
    save_before_s: int = Field(default=180, ge=0)
    """Seconds before the time limit at which the run saves and submits itself again. Slurm may be a minute late."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """CPUs of a replica on each of its machines, for all its ranks. Not set: Slurm's default, often one."""
    container_image: str = ""
    """Image with the command cosmos-rl for the processes, with the pyxis plug-in of Slurm. Not set: no container."""
    container_mounts: str = ""
    """Mounts of the container, as "/from:/to,/other:/other". The run's directory, [checkpoint] path, and the folders of
    the recipe and of `launch` are mounted too, at their paths."""
    gang: bool = False
    """Run the rollout replicas in the job of the controller and the policies, which then starts with all or not at
    all. On a machine there are as many as fit on the GPUs that a policy has on each of its machines."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch for all jobs, such as "--reservation=night"."""

    @field_validator("extra")
    @classmethod
    def _options(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for one in extra:
            if not one.startswith("-") or "\n" in one:
                raise ValueError(f'has {one!r}, which is not an option of sbatch such as "--reservation=night"')
        return extra


class RaySection(Strict):
    """[cluster.ray]: the cluster that `cosmos-rl launch --on ray` starts actors in."""

    address: str = ""
    """Address of the cluster, such as "10.0.0.1:6379". Not set: RAY_ADDRESS, else the cluster of this machine."""
    namespace: str = "cosmos-rl"
    """Ray's namespace of the actors. `status`, `scale` and `stop` find them in it."""
    resources: dict[Literal["controller", "policy", "rollout"], dict[str, float]] = Field(default_factory=dict)
    """Resources that Ray reserves for each process of a role, on each of its machines, such as
    { rollout = { CPU = 8, "accelerator_type:H100" = 0.001 } }. Not set: one CPU, and the GPUs of the role."""
    place_s: float = Field(default=60.0, ge=0)
    """Maximum time until the cluster has a place for all processes, in seconds; longer where machines are added on
    demand."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime_env of the actors, such as { image_uri = "registry/image", py_executable = "/env/bin/python" }."""

    @field_validator("resources")
    @classmethod
    def _amounts(cls, resources: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for role, amounts in resources.items():
            for name, amount in amounts.items():
                if amount < 0:
                    raise ValueError(f"has {name} = {amount:g} for {role}; an amount is at least 0")
        return resources


class KubernetesSection(Strict):
    """[cluster.kubernetes]: options of the objects that `cosmos-rl launch --on kubernetes` creates."""

    image: str = ""
    """Container image with cosmos-rl, the domain and the modules of the recipe. Required."""
    claim: str = ""
    """PersistentVolumeClaim for the run's directory. Required. The controller alone mounts it if [checkpoint] path is a
    URL such as "s3://..."; otherwise all pods do, for which its access mode must be ReadWriteMany."""
    mount_path: str = Field(default="/runs", pattern="^/.*[^/]$")
    """Folder at which pods mount the claim. The run's directory is in it, under the run's label."""
    namespace: str = ""
    """Namespace. Not set: that of kubectl's context."""
    port: int = Field(default=29400, ge=1, le=65535)
    """Port on which the controller listens."""
    token_secret: str = ""
    """An existing Secret with the run's token, 64 hexadecimal digits, as its key "token". Not set: a new Secret."""
    queue: str = ""
    """LocalQueue of Kueue for the JobSet and for the Job of each rollout replica. Not set: no queue."""
    gpu_resource: str = Field(default="nvidia.com/gpu", min_length=1)
    """Name of the resource of a GPU."""
    shm_size: str = ""
    """Maximum size of /dev/shm, such as "64Gi"; it counts as memory of the container. Not set: half of the node's
    memory."""
    save_s: int = Field(default=120, ge=0)
    """Seconds that a policy gets to save after SIGTERM. A pod is killed `save_s` + [elastic] leave_s after it."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """PodTemplateSpec to merge into those of all roles, as a strategic merge patch: { spec = { nodeSelector = { pool =
    "gpu" } } }. The container's name is "cosmos-rl"."""
    controller_pod: dict[str, Any] = Field(default_factory=dict)
    """As `pod`, for the controller alone."""
    policy_pod: dict[str, Any] = Field(default_factory=dict)
    """As `pod`, for policies alone."""
    rollout_pod: dict[str, Any] = Field(default_factory=dict)
    """As `pod`, for rollouts alone."""

    @field_validator("pod", "controller_pod", "policy_pod", "rollout_pod")
    @classmethod
    def _template(cls, pod: dict[str, Any]) -> dict[str, Any]:
        for key, value in pod.items():
            if key not in ("metadata", "spec") or not isinstance(value, dict):
                raise ValueError(f"has {key!r}; the keys of a PodTemplateSpec are the tables metadata and spec")
        return pod


class ClusterSection(Strict):
    """[cluster]: the processes of the run on the machines of a platform, started by `cosmos-rl launch`."""

    gpus: bool = True
    """Request GPUs: one for each policy rank, and for a rollout replica as many as its engine needs."""
    command: str = ""
    """Command of cosmos-rl on the machines. Not set: the one of this environment, which all machines must see, or
    "cosmos-rl" in a container."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the processes start, such as "module load cuda"."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of all processes, such as { NCCL_IB_TIMEOUT = "22" }."""
    start_wait_s: int = Field(default=3600, ge=0)
    """Time that a worker waits for the start of the controller, whose job may start later."""
    slurm: SlurmSection = SlurmSection()
    """Options of the jobs on Slurm."""
    ray: RaySection = RaySection()
    """The cluster of Ray."""
    kubernetes: KubernetesSection = KubernetesSection()
    """Options of the objects on Kubernetes."""

    @property
    def has_image(self) -> bool:
        """Whether the packages of the processes are those of an image, not of this machine."""
        return bool(self.slurm.container_image or "image_uri" in self.ray.extra or self.kubernetes.image)
