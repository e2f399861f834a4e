/** A number that a request may bring; where it is left empty, the server's default holds. */
export interface SamplingField {
  name: string;
  label: string;
  hint: string;
  min?: number;
  max?: number;
  step: number | "any";
}

export const FIELDS: SamplingField[] = [
  { name: "max_tokens", label: "Most tokens", hint: "as many as fit", min: 1, step: 1 },
  { name: "temperature", label: "Temperature", hint: "0: likeliest", min: 0, step: "any" },
  { name: "top_p", label: "Top p", hint: "0 to 1", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", hint: "0: all", min: -1, step: 1 },
  { name: "min_p", label: "Min p", hint: "0 to 1", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1: none", min: 0, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", hint: "−2 to 2", min: -2, max: 2, step: "any" },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "−2 to 2", min: -2, max: 2, step: "any" },
  { name: "seed", label: "Seed", hint: "any", min: 0, step: 1 },
];

/** What is set beside the conversation. */
export interface Settings {
  system: string;
  /** By name of the field, as it was typed. */
  numbers: Readonly<Record<string, string>>;
  /** One a line. */
  stop: string;
  logprobs: boolean;
  numTop: string;
}

export const INITIAL: Settings = { system: "", numbers: {}, stop: "", logprobs: false, numTop: "5" };

/** The settings as fields of a request. */
export function requestFields(settings: Settings): Record<string, unknown> {
  const fields: Record<string, unknown> = {};
  for (const { name } of FIELDS) {
    const typed = settings.numbers[name] ?? "";
    if (typed !== "") fields[name] = Number(typed);
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length > 0) fields.stop = stop;
  if (settings.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: Number(settings.numTop) });
  return fields;
}
