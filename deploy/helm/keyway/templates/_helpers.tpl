{{- define "keyway.selector" -}}
app.kubernetes.io/name: keyway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "keyway.labels" -}}
{{ include "keyway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "keyway.workerSelector" -}}
keyway.dev/role: worker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "keyway.workerLabels" -}}
{{ include "keyway.workerSelector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Of the workers of one role, or of all: (dict "root" $ "role" …). */}}
{{- define "keyway.partSelector" -}}
{{ include "keyway.workerSelector" .root }}
{{- with .role }}
llm-d.ai/role: {{ . }}
{{- end }}
{{- end }}

{{- define "keyway.partLabels" -}}
{{ include "keyway.workerLabels" .root }}
{{- with .role }}
llm-d.ai/role: {{ . }}
{{- end }}
{{- end }}

{{- define "keyway.partName" -}}
{{ .root.Values.workers.name }}{{ with .role }}-{{ . }}{{ end }}
{{- end }}

{{- define "keyway.config" -}}
{{ tpl .Values.config . }}
{{- end }}
