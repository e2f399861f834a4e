import { memo } from "preact/compat";
import { useCallback, useState } from "preact/hooks";

import type { Token } from "./exchange";

/** The text of a token where its blanks would not show. */
function spelled(text: string): string {
  return JSON.stringify(text);
}

function percent(logprob: number): string {
  const share = 100 * Math.exp(logprob);
  return share > 0 && share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}

/** 0 for the most likely tokens to 4 for the least: how strongly they are marked. */
function surprise(logprob: number): number {
  const bounds = [0.8, 0.4, 0.15, 0.05];
  const share = Math.exp(logprob);
  const at = bounds.findIndex((bound) => share >= bound);
  return at < 0 ? bounds.length : at;
}

/** An answer token by token. One of them takes part in the order of Tab; arrow keys lead to the others. */
export function Tokens({ tokens }: { tokens: Token[] }) {
  const [current, setCurrent] = useState(0);
  const [isShown, setIsShown] = useState(false);
  const select = useCallback((index: number) => {
    setCurrent(index);
    setIsShown(true);
  }, []);
  const move = (event: KeyboardEvent) => {
    const target = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    (event.currentTarget as HTMLElement).querySelectorAll<HTMLElement>(".token")[target]?.focus();
  };
  const token = tokens[current];
  return (
    <>
      <p class="text tokens" role="group" aria-label="Tokens of the answer; arrow keys move" onKeyDown={move}>
        {tokens.map((each, index) => (
          <TokenSpan key={index} token={each} index={index} isCurrent={index === current} select={select} />
        ))}
      </p>
      {isShown && token !== undefined ? (
        <TokenDetails token={token} />
      ) : (
        <p class="muted">Point at a token, or use Tab and the arrow keys, to see what else might have come.</p>
      )}
    </>
  );
}

interface SpanProps {
  token: Token;
  index: number;
  isCurrent: boolean;
  select: (index: number) => void;
}

const TokenSpan = memo(({ token, index, isCurrent, select }: SpanProps) => (
  <span
    class={`token p${surprise(token.logprob)}`}
    role="img"
    tabIndex={isCurrent ? 0 : -1}
    aria-label={`${spelled(token.text)}, ${percent(token.logprob)}`}
    onFocus={() => select(index)}
    onPointerEnter={() => select(index)}
  >
    {/* Ends of lines take room, so that they can be pointed at. */}
    {token.text.replaceAll("\n", "↵\n")}
  </span>
));

function TokenDetails({ token }: { token: Token }) {
  // The token itself may be none of the most likely ones.
  const isListed = token.top.some((other) => other.text === token.text);
  const rows = isListed ? token.top : [...token.top, token];
  return (
    <table class="candidates">
      <caption>
        {spelled(token.text)}: {percent(token.logprob)}, log-probability {token.logprob.toFixed(3)}
      </caption>
      <thead>
        <tr>
          <th scope="col">token</th>
          <th scope="col">probability</th>
          <th scope="col" aria-hidden="true" />
        </tr>
      </thead>
      <tbody>
        {rows.map(({ text, logprob }, index) => (
          <tr key={index} class={text === token.text ? "taken" : ""}>
            <th scope="row">{spelled(text)}</th>
            <td>{percent(logprob)}</td>
            <td class="bar" aria-hidden="true">
              <span style={{ width: `${100 * Math.exp(logprob)}%` }} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
