import { useState } from "preact/hooks";

import { FIELDS, type Settings } from "./sampling";

interface Props {
  settings: Settings;
  change: (settings: Settings) => void;
}

export function SettingsPanel({ settings, change }: Props) {
  // On a phone it would push the conversation out of sight.
  const [isOpen] = useState(() => matchMedia("(min-width: 56rem)").matches);
  const valueOf = (event: Event) => (event.currentTarget as HTMLInputElement).value;
  return (
    <details class="card settings" open={isOpen}>
      <summary>Settings</summary>
      <label for="system">System prompt</label>
      <textarea
        id="system"
        rows={3}
        value={settings.system}
        onInput={(event) => change({ ...settings, system: valueOf(event) })}
      />
      <fieldset>
        <legend>Sampling</legend>
        <p class="muted">What is left empty is the model's or the server's default.</p>
        <div class="fields">
          {FIELDS.map(({ name, label, hint, ...bounds }) => (
            <div key={name}>
              <label for={name}>{label}</label>
              <input
                id={name}
                type="number"
                inputMode="decimal"
                placeholder={hint}
                value={settings.numbers[name] ?? ""}
                onInput={(event) => change({ ...settings, numbers: { ...settings.numbers, [name]: valueOf(event) } })}
                {...bounds}
              />
            </div>
          ))}
        </div>
        <label for="stop">Stop at (one a line)</label>
        <textarea
          id="stop"
          rows={2}
          value={settings.stop}
          onInput={(event) => change({ ...settings, stop: valueOf(event) })}
        />
      </fieldset>
      <fieldset>
        <legend>Log-probabilities</legend>
        <label class="check">
          <input
            type="checkbox"
            checked={settings.logprobs}
            onChange={(event) => change({ ...settings, logprobs: event.currentTarget.checked })}
          />
          Show tokens with their probabilities
        </label>
        <label for="num-top">Likeliest tokens to show for each</label>
        <input
          id="num-top"
          type="number"
          min={0}
          max={20}
          step={1}
          value={settings.numTop}
          disabled={!settings.logprobs}
          onInput={(event) => change({ ...settings, numTop: valueOf(event) })}
        />
      </fieldset>
    </details>
  );
}
