import type { Explanation } from "./exchange";

const NUMBERS: Record<string, string> = {
  temperature: "Temperature",
  top_p: "Top p",
  top_k: "Top k",
  min_p: "Min p",
  repetition_penalty: "Repetition penalty",
  presence_penalty: "Presence penalty",
  frequency_penalty: "Frequency penalty",
  seed: "Seed",
  max_tokens: "Most tokens",
};

const SOURCES: Record<string, string> = {
  request: "the request",
  generation_config: "the model's own configuration",
  default: "the API's default",
  reply_format: "the model's way of writing replies",
  engine: "the engine's seed",
  context: "what the context has room for",
};

/** How an answer was served: what ran it, where its time went, and which values held, from where. */
export function Why({ explanation }: { explanation: Explanation }) {
  const { implementation, sampling, grammar, truncation } = explanation;
  return (
    <details class="why">
      <summary>How it was served</summary>
      {implementation && (
        <p>
          {implementation.name} in {implementation.dtype}: {implementation.reason}. Kernels: {implementation.kernels}.
        </p>
      )}
      <p>{times(explanation)}</p>
      {grammar && (
        <p>
          Held to a form ({grammar.kind}): compiled in {seconds(grammar.compile_seconds)}, masked for{" "}
          {seconds(grammar.mask_seconds)}.
        </p>
      )}
      {truncation && (
        <p>
          {truncation.asked} tokens were asked for; the context has room for {truncation.given}.
        </p>
      )}
      <table>
        <thead>
          <tr>
            <th scope="col">Value</th>
            <th scope="col">held</th>
            <th scope="col">from</th>
          </tr>
        </thead>
        <tbody>
          {Object.entries(NUMBERS).map(([name, label]) => (
            <tr key={name}>
              <th scope="row">{label}</th>
              <td>{String(sampling[name]?.value ?? "none")}</td>
              <td>{SOURCES[sampling[name]?.source ?? ""] ?? sampling[name]?.source}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

function times(explanation: Explanation): string {
  const parts = [
    `Laid out in ${seconds(explanation.prepare_seconds)}`,
    `waited ${seconds(explanation.queue_seconds)}`,
    `read the prompt for ${seconds(explanation.prefill_seconds)}`,
    `answered for ${seconds(explanation.decode_seconds)}`,
  ];
  if (explanation.num_preemptions > 0) parts.push(`was set aside ${explanation.num_preemptions} times`);
  return `${parts.join(", ")}.`;
}

function seconds(value: number | null): string {
  return value === null ? "no time" : `${value < 1 ? value.toFixed(3) : value.toFixed(2)} s`;
}
