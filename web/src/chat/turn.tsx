import type { Exchange } from "./exchange";
import { Tokens } from "./tokens";
import { Why } from "./why";

/** What was said, and the answer as far as it has come. All of it is text, whatever it looks like. */
export function Turn({ exchange }: { exchange: Exchange }) {
  const { prompt, reasoning, content, tokens, state, error, facts, explanation } = exchange;
  return (
    <li class="turn">
      <article class="said" aria-label="You">
        <p class="text">{prompt}</p>
      </article>
      <article class="answer" aria-label="Answer" data-state={state}>
        {reasoning !== "" && (
          // Open while nothing else is there to be read.
          <details class="reasoning" open={content === ""}>
            <summary>Reasoning</summary>
            <p class="text">{reasoning}</p>
          </details>
        )}
        {tokens.length > 0 ? <Tokens tokens={tokens} /> : <p class="text">{content}</p>}
        {state === "streaming" && <span class="writing" aria-hidden="true" />}
        {state === "stopped" && <p class="muted">Stopped.</p>}
        {state === "failed" && (
          <p class="error" role="alert">
            {error}
          </p>
        )}
        {facts.length > 0 && <p class="facts muted">{facts.join(" · ")}</p>}
        {explanation && <Why explanation={explanation} />}
      </article>
    </li>
  );
}
