"""The fields that a Pod may have (1.36), by what is done with them here. READ are read; NOTED would change what a
container is or sees, and are passed over with a note; QUIET mean nothing here. Any other is a mistake."""

from __future__ import annotations


def _fields(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OBJECT = _fields("apiVersion kind metadata spec status")
METADATA = _fields("""
    name generateName namespace uid labels annotations selfLink resourceVersion generation creationTimestamp
    deletionTimestamp deletionGracePeriodSeconds ownerReferences finalizers managedFields clusterName
""")
POD_READ = _fields("""
    containers initContainers restartPolicy nodeSelector nodeName runtimeClassName securityContext serviceAccountName
    tolerations
""")
POD_NOTED = _fields("""
    volumes ephemeralContainers hostNetwork hostPID hostIPC shareProcessNamespace affinity schedulingGates
    resourceClaims resources topologySpreadConstraints overhead hostUsers hostname hostnameOverride os workloadRef
    schedulingGroup
""")
POD_QUIET = _fields("""
    terminationGracePeriodSeconds activeDeadlineSeconds dnsPolicy serviceAccount automountServiceAccountToken
    imagePullSecrets subdomain schedulerName hostAliases priorityClassName priority dnsConfig readinessGates
    enableServiceLinks preemptionPolicy setHostnameAsFQDN
""")
POD = (*POD_READ, *POD_NOTED, *POD_QUIET)
POD_CONTEXT_NOTED = _fields("""
    runAsGroup runAsNonRoot seLinuxOptions windowsOptions seccompProfile appArmorProfile supplementalGroups
    supplementalGroupsPolicy fsGroup fsGroupChangePolicy sysctls seLinuxChangePolicy
""")
POD_CONTEXT = ("runAsUser", *POD_CONTEXT_NOTED)
CONTAINER_READ = _fields("name image command args env envFrom resources restartPolicy securityContext")
CONTAINER_NOTED = _fields("""
    volumeMounts volumeDevices lifecycle livenessProbe readinessProbe startupProbe workingDir restartPolicyRules
""")
CONTAINER_QUIET = _fields("""
    ports resizePolicy terminationMessagePath terminationMessagePolicy imagePullPolicy stdin stdinOnce tty
""")
CONTAINER = (*CONTAINER_READ, *CONTAINER_NOTED, *CONTAINER_QUIET)
CONTEXT_NOTED = _fields("""
    runAsGroup runAsNonRoot seLinuxOptions windowsOptions seccompProfile appArmorProfile capabilities
    readOnlyRootFilesystem allowPrivilegeEscalation procMount
""")
CONTEXT = ("runAsUser", "privileged", *CONTEXT_NOTED)
