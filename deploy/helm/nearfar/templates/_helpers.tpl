{{- define "nearfar.name" -}}
{{- printf "%s-nearfar" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "nearfar.labels" -}}
app.kubernetes.io/name: nearfar
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "nearfar.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: front
{{- end -}}

{{- define "nearfar.vllmPods" -}}
matchLabels:
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [vllm, vllm-model]}
{{- end -}}

{{- define "nearfar.huggingFaceSecret" -}}
{{- .Values.vllm.huggingFace.existingSecret | default (printf "%s-hugging-face" (include "nearfar.name" .)) -}}
{{- end -}}

{{- define "nearfar.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "nearfar.name" .)) -}}
{{- end -}}

{{- define "nearfar.upstreamSecret" -}}
{{- .Values.upstreamKey.existingSecret | default (printf "%s-upstream" (include "nearfar.name" .)) -}}
{{- end -}}

{{- define "nearfar.maxUpstreams" -}}
{{- if eq .Values.autoscaling.kind "none" }}{{ .Values.vllm.replicas }}{{ else }}{{ .Values.autoscaling.maxReplicas }}{{ end -}}
{{- end -}}

{{- define "nearfar.underWay" -}}
sum(nearfar:num_requests_running{namespace={{ .Release.Namespace | quote }},service={{ include "nearfar.name" . | quote }}}) + sum(nearfar:num_requests_waiting{namespace={{ .Release.Namespace | quote }},service={{ include "nearfar.name" . | quote }}})
{{- end -}}
